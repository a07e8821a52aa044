"""The wrappers of PTX instructions: one file per family, one instruction per wrapper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlagen.codegen.sources import template_root
from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.errors import CompileError
from mlagen.spec.arch import ARCHS, Arch
from tests.kernels import COMBINE, require_known

from .headers import flattened

FAMILIES = {path.stem: path for path in sorted((template_root() / "ptx").glob("*.cuh"))}

_HEADER = re.compile(r'// PTX ISA, "[^"]+"\. Needs sm_(\d+)\.')
_WRAPPER = re.compile(
    r"(?P<comment>(?:^//.*\n)*)"
    r"(?P<template>^template <.*>\n)?"
    r"^__device__ inline (?P<result>\w+) (?P<name>\w+)\((?P<parameters>[^{}]*?)\) \{"
    r"(?P<body>.*\}\n|\n(?:.*\n)*?\}\n)",
    re.MULTILINE,
)
_ASM = re.compile(r"\basm\s*(?:volatile)?\s*\(")
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


def minimum(path: Path) -> int:
    """Return the number of the first architecture that a family's first line says it needs."""
    match = _HEADER.match(path.read_text())
    assert match is not None, f"{path.name}: the first line names no manual section or no sm_"
    return int(match[1])


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


def compile_family(path: Path, arch: Arch) -> bytes:
    """Compile a family alone, with a kernel that calls all of it; return the machine code."""
    calls = "\n".join(f"  {wrapper.call()}" for wrapper in wrappers(path))
    kernel = f'extern "C" __global__ void probe() {{\n{calls}\n}}\n'
    includes = ['#include "common/types.cuh"', f'#include "ptx/{path.name}"']
    source = flattened([*includes, *CALLS.splitlines(), *kernel.splitlines()], COMBINE)
    return compile_source(source, arch, find_nvrtc()).code


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_compiles_alone_for_its_first_architecture(family: str) -> None:
    """It needs the types and nothing else, and ptxas takes every instruction."""
    path = FAMILIES[family]
    arch = next(arch for arch in ARCHS if arch.number >= minimum(path))
    require_known(arch)

    code = compile_family(path, arch)

    assert code.startswith(b"\x7fELF")


NOT_EVERYWHERE = [name for name, path in FAMILIES.items() if minimum(path) > ARCHS[0].number]


@pytest.mark.parametrize("family", NOT_EVERYWHERE)
def test_the_stated_minimum_is_the_real_one(family: str) -> None:
    """On the architecture before, ptxas rejects the family."""
    path = FAMILIES[family]
    before = [arch for arch in ARCHS if arch.number < minimum(path)][-1]
    require_known(before)

    rejection = f"sm_{minimum(path)}|not supported on .target '{before}'"
    with pytest.raises(CompileError, match=rejection):
        compile_family(path, before)


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
def test_names_are_the_mnemonic(family: str) -> None:
    """File, wrapper and instruction begin with the same word."""
    found = list(wrappers(FAMILIES[family]))
    # Forms that only newer architectures have are in a file of their own, named for their type.
    word = family.removesuffix("_e4m3")

    assert [wrapper.name for wrapper in found if not wrapper.name.startswith(word)] == []
    instructions = [wrapper.instruction for wrapper in found if wrapper.instruction]
    spelled = [instruction.replace(".", "_") for instruction in instructions]
    assert [name for name in spelled if not name.startswith(word)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_wrapper_is_seen_by_these_tests(family: str) -> None:
    """No function of a family escapes the pattern that finds wrappers."""
    text = FAMILIES[family].read_text()

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
