"""The wrappers of PTX instructions: one file per family, one instruction per wrapper."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlagen.artifacts import Source
from mlagen.codegen.sources import template_root
from mlagen.compiler.nvrtc import compile_source, compile_to_ptx
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.errors import CompileError
from mlagen.spec.arch import ARCHS
from tests.kernels import COMBINE, SM_90A, require_known

from .headers import flattened

FAMILIES = {path.stem: path for path in sorted((template_root() / "ptx").glob("*.cuh"))}

_HEADER = re.compile(r'// PTX ISA, "[^"]+: (?P<mnemonics>[^":]+)"\. Needs sm_(?P<minimum>\d+)\.')
_MINIMUM = re.compile(r"\bNeeds sm_(\d+)\.$")
_DIRECTIVE = re.compile(r"^#(?:\\\n|.)*\n", re.MULTILINE)
_WRAPPER = re.compile(
    r"(?P<comment>(?:^//.*\n)*)"
    r"(?P<template>^template <.*>\n)?"
    r"^__device__ inline (?P<result>\w+) (?P<name>\w+)\((?P<parameters>[^{}]*?)\) \{"
    r"(?P<body>.*\}\n|\n(?:.*\n)*?\}\n)",
    re.MULTILINE,
)
_ASM = re.compile(r"\b(?:asm\s*(?:volatile)?|[A-Z]+_[A-Z]+)\s*\(")  # spelled out, or by a macro
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


# Template arguments where 0 is none that the instruction takes.
TEMPLATE_ARGUMENTS = {"setmaxnreg_dec": 24, "setmaxnreg_inc": 24, "wgmma_fence_operand": 8}


@dataclass(frozen=True)
class Wrapper:
    """One function of a family."""

    name: str
    result: str
    is_template: bool
    parameters: list[str]
    comment: list[str]  # the lines above it
    body: str

    @property
    def instruction(self) -> str | None:
        """The instruction that its comment names; None if it says that there is none."""
        has_none = " ".join(self.comment).endswith("no instruction.")
        return None if has_none or not _ASM.search(self.body) else self.comment[0]

    def call(self) -> str:
        """Return a statement that calls it with anything, and uses what it returns."""
        chosen = f"<{TEMPLATE_ARGUMENTS.get(self.name, 0)}>" if self.is_template else ""
        arguments = [_argument(parameter, self.name) for parameter in self.parameters]
        call = f"{self.name}{chosen}({', '.join(arguments)})"
        return f"{call};" if self.result == "void" else f"use({call});"


def _argument(parameter: str, wrapper: str) -> str:
    """Return what to pass: what wrappers of one name differ in is spelled out."""
    if parameter in {"Bf16", "Fp16", "E4m3"}:
        return f"{parameter}{{}}"
    if array := re.fullmatch(r"(?P<element>.+) \(&\w+\)\[(?P<count>\w+)\]", parameter):
        count = array["count"] if array["count"].isdigit() else TEMPLATE_ARGUMENTS[wrapper]
        return f"array<{array['element']}, {count}>()"
    kind = parameter.rpartition(" ")[0]
    return f"array<{kind}, 1>()[0]" if kind == "u64" or kind.endswith("*") else "Anything{}"


def wrappers(path: Path) -> Iterator[Wrapper]:
    """Yield the functions of a family."""
    for match in _WRAPPER.finditer(path.read_text()):
        parameters = " ".join(match["parameters"].split())
        yield Wrapper(
            name=match["name"],
            result=match["result"],
            is_template=match["template"] is not None,
            parameters=parameters.split(", ") if parameters else [],
            comment=[line.removeprefix("// ") for line in match["comment"].splitlines()],
            body=match["body"],
        )


def header(path: Path) -> re.Match[str]:
    """Return what the first sentences of a family say of it."""
    match = _HEADER.match(path.read_text().replace("\n// ", " "))
    assert match is not None, f"{path.name}: the first line names no manual section or no sm_"
    return match


def minimum(path: Path, wrapper: Wrapper) -> int:
    """Return the number of the first architecture of a wrapper: its own, or the family's."""
    own = _MINIMUM.search(" ".join(wrapper.comment))
    return int(own[1] if own else header(path)["minimum"])


# A kernel that calls every wrapper of a family, with operands that no compiler can foresee.
CALLS = """
__device__ inline unsigned char* bytes() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}
struct Anything {
  template <typename T>
  __device__ operator T&() const {
    return *reinterpret_cast<T*>(bytes());
  }
};
template <typename T, int kCount>
__device__ inline T (&array())[kCount] {
  return *reinterpret_cast<T(*)[kCount]>(bytes());
}
template <typename T>
__device__ inline void use(T value) {
  const unsigned char* from = reinterpret_cast<const unsigned char*>(&value);
  volatile unsigned char* to = bytes();
  for (int i = 0; i < int(sizeof(T)); ++i) to[i] = from[i];
}
"""


def probe(path: Path, found: list[Wrapper]) -> Source:
    """Return a kernel that includes a family alone and calls some of its wrappers."""
    calls = "\n".join(f"  {wrapper.call()}" for wrapper in found)
    kernel = f'extern "C" __global__ void probe() {{\n{calls}\n}}\n'
    includes = ['#include "common/types.cuh"', f'#include "ptx/{path.name}"']
    return flattened([*includes, *CALLS.splitlines(), *kernel.splitlines()], COMBINE)


FORMS = {
    (name, minimum(path, wrapper)): None
    for name, path in FAMILIES.items()
    for wrapper in wrappers(path)
}


@pytest.mark.parametrize(("family", "number"), FORMS)
def test_a_family_compiles_alone_for_its_first_architecture(family: str, number: int) -> None:
    """It needs the types and nothing else, and ptxas takes every instruction."""
    path = FAMILIES[family]
    arch = next(arch for arch in ARCHS if arch.number >= number)
    require_known(arch)
    found = [wrapper for wrapper in wrappers(path) if minimum(path, wrapper) <= number]
    code = compile_source(probe(path, found), arch, find_nvrtc()).code
    assert code.startswith(b"\x7fELF")


NOT_EVERYWHERE = [(family, number) for family, number in FORMS if number > ARCHS[0].number]


@pytest.mark.parametrize(("family", "number"), NOT_EVERYWHERE)
def test_the_stated_minimum_is_the_real_one(family: str, number: int) -> None:
    """On the architecture before, ptxas rejects the instructions."""
    path = FAMILIES[family]
    before = [arch for arch in ARCHS if arch.number < number][-1]
    require_known(before)
    found = [wrapper for wrapper in wrappers(path) if minimum(path, wrapper) == number]
    rejection = f"sm_{number}|not supported on .target '{before}'"
    with pytest.raises(CompileError, match=rejection):
        compile_source(probe(path, found), before, find_nvrtc())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comment_above_a_wrapper_is_the_instruction_inside(family: str) -> None:
    """The instruction stands above each wrapper as PTX spells it, and inside once."""
    found = list(wrappers(FAMILIES[family]))

    assert found
    for wrapper in found:
        if not _ASM.search(wrapper.body):
            continue
        instruction = wrapper.instruction
        text = "".join(_LITERAL.findall(wrapper.body.partition(":")[0]))
        if instruction is None:
            assert text == "", wrapper.name
            continue
        text = "".join(_LITERAL.findall(wrapper.body))
        assert re.fullmatch(r"[a-z][a-z0-9_]*([.:]+[A-Za-z0-9_]+)*", instruction), wrapper.name
        assert instruction in text, wrapper.name
        assert len(_ASM.findall(wrapper.body)) == 1, wrapper.name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comment_above_a_wrapper_is_the_instruction_compiled(family: str) -> None:
    """The PTX of the calls of a family's wrappers has each instruction as often as the comments."""
    found = [wrapper for wrapper in wrappers(FAMILIES[family]) if wrapper.instruction]
    counts = Counter(f"{wrapper.instruction}" for wrapper in found)
    ptx = compile_to_ptx(probe(FAMILIES[family], found), SM_90A, find_nvrtc())
    emitted = {
        instruction: len(re.findall(rf"\b{re.escape(instruction)}(?![\w.:])", ptx))
        for instruction in counts
    }
    assert emitted == counts


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_the_mnemonic(family: str) -> None:
    """Wrapper and instruction begin with the file's name, or its first line lists how they do."""
    listed = header(FAMILIES[family])["mnemonics"].replace(".", "_").split(", ")
    words = [family] if any(word.startswith(family) for word in listed) else listed
    for wrapper in wrappers(FAMILIES[family]):
        spelled = [wrapper.name, *filter(None, [wrapper.instruction])]
        assert any(
            all(name.replace(".", "_").startswith(word) for name in spelled) for word in words
        ), wrapper.name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_wrapper_is_seen_by_these_tests(family: str) -> None:
    """No function of a family escapes the pattern that finds wrappers."""
    text = _DIRECTIVE.sub("", FAMILIES[family].read_text())
    assert len(list(wrappers(FAMILIES[family]))) == text.count("__device__")
    assert sum(len(_ASM.findall(wrapper.body)) for wrapper in wrappers(FAMILIES[family])) == len(
        _ASM.findall(text)
    )


def test_inline_assembly_lives_in_ptx_only() -> None:
    """Blocks, roles and kernels call instructions by name."""
    elsewhere = [
        str(path.relative_to(template_root()))
        for path in template_root().rglob("*")
        if path.suffix in {".cuh", ".j2"} and path.parent.name != "ptx"
        if _ASM.search(path.read_text())
    ]
    assert elsewhere == []
