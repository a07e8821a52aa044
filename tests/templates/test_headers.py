"""Headers include what they use: each compiles alone, and no `#include` is unused or missing."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from mlagen.artifacts import Source
from mlagen.codegen.render import render, rendered_file
from mlagen.compiler.nvrtc import compile_to_ptx
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.errors import CompileError
from mlagen.spec.arch import Arch
from mlagen.spec.kernel import KernelSpec
from tests.built_once import built_once, compiler_code
from tests.fixture_types import Patch
from tests.kernels import COMBINE, SM_80, SM_90A, gqa_sm90, mla_sm90, mla_sm90_fp8, require_known

from .headers import Variant, compiled_alone, flattened, includes_of, variants
from .symbols import defined_names, used_names


def compile_error(source: Source, arch: Arch) -> str:
    """Compile a header with nothing but what it includes; return what the compiler says."""

    def build(file: Path) -> None:
        compile_to_ptx(source, arch, find_nvrtc())
        file.touch()

    made_of = (source.text, str(arch), str(find_nvrtc()), compiler_code())
    try:
        built_once("compiles.txt", build, made_of=made_of)
    except CompileError as error:  # for which a later run compiles again
        return error.log
    return ""


def test_every_header_compiles_alone() -> None:
    """A header declares all that it uses by its includes; the scans below know all choices."""
    require_known(SM_90A)
    specs = {
        name: variant.spec
        for variant in variants()
        if variant.spec.arch in {SM_80, SM_90A}
        for name in variant.headers
    }
    alone = [(compiled_alone(name, spec), spec.arch) for name, spec in specs.items()]

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC lets go of the interpreter lock
        errors = list(pool.map(lambda header: compile_error(*header), alone))

    assert len(errors) >= 100
    assert not any(errors), errors


def test_a_header_without_its_includes_does_not_compile() -> None:
    """What the compiler is given is the header alone."""
    source = flattened(["__device__ inline u32 one() { return 1; }"], COMBINE)
    with pytest.raises(CompileError, match="u32"):
        compile_to_ptx(source, COMBINE.arch, find_nvrtc())


def test_a_failure_of_the_compiler_is_not_kept(tmp_path: Path, monkeypatch: Patch) -> None:
    """It may be the machine's; what compiles once does so in later runs."""
    monkeypatch.setattr("tests.built_once._folders", [tmp_path] * 2)
    failures = [CompileError("", log="out of memory", source="")]

    def compile_(*_: object) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setitem(globals(), "compile_to_ptx", compile_)
    source = Source(text="", origins=())

    assert [compile_error(source, SM_90A) for _ in range(2)] == ["out of memory", ""]
    failures.append(CompileError("", log="never seen", source=""))
    assert compile_error(source, SM_90A) == ""


BREACHES: dict[str, tuple[KernelSpec, str, str, str]] = {
    "slots of the work pipeline": (
        mla_sm90(),
        "  Barrier work_full[2];",
        "  Barrier work_full[3];",
        "common/contract.cuh",
    ),
    "a parameter of a store": (
        mla_sm90_fp8(),
        "store_rows(const Params& params, const WorkItem& work, SharedMemoryPlan&,",
        "store_rows(const Params& params, const WorkItem& work, const SharedMemoryPlan&,",
        "common/contract.cuh",
    ),
    "a type of a sequence": (
        gqa_sm90(),
        "  int num_tiles;  // work tiles",
        "  i64 num_tiles;  // work tiles",
        "scheduler/contract.cuh",
    ),
}


@pytest.mark.parametrize(("spec", "old", "new", "file"), BREACHES.values(), ids=BREACHES)
def test_a_family_that_breaks_the_contract_is_an_error_there(
    spec: KernelSpec, old: str, new: str, file: str
) -> None:
    """The first error is an assertion with the meaning of what shared templates take."""
    source = render(spec)
    assert source.text.count(old) == 1
    broken = Source(text=source.text.replace(old, new), origins=source.origins)

    with pytest.raises(CompileError, match=rf"{file}:\d+ .*: static assertion failed with"):
        compile_to_ptx(broken, spec.arch, find_nvrtc())


@cache
def scanned(lines: str) -> tuple[frozenset[str], frozenset[str], bool]:
    """Return what a text defines, what it uses, and whether it has code besides directives."""
    code = [line for line in lines.split("\n") if line and not line.startswith(("//", "#"))]
    return frozenset(defined_names(lines)), frozenset(used_names(lines)), bool(code)


class Names:
    """The names of one kernel's files."""

    def __init__(self, variant: Variant) -> None:
        self.spec = variant.spec
        self.files = {
            name: scanned("\n".join(rendered_file(name, variant.spec).lines))
            for name in variant.files
        }

    def used(self, name: str) -> frozenset[str]:
        """Return the names that a file may use."""
        return self.files[name][1]

    def provided(self, name: str) -> frozenset[str]:
        """Return the names that an include of a file gives.

        Those are its own; of a file that only chooses, and of the constants, with all it includes.
        """
        defined, _, has_code = self.files[name]
        if has_code and not name.endswith("/config.cuh.j2"):
            return defined
        return defined.union(*(self.provided(file) for _, file in includes_of(name, self.spec)))

    def missing(self, name: str) -> frozenset[str]:
        """Return the names that a file uses, of files that it does not include itself."""
        defined, used, has_code = self.files[name]
        if not has_code:
            return frozenset()
        known = frozenset[str].union(*(found for found, _, _ in self.files.values()))
        included = (self.provided(file) for _, file in includes_of(name, self.spec))
        return (used & known) - defined.union(*included)


def unused_includes(found: list[Names]) -> set[tuple[str, str]]:
    """Return the `#include` lines, as file and name, that no kernel needs."""
    unused: set[tuple[str, str]] = set()
    needed: set[tuple[str, str]] = set()
    for names in found:
        for file, (_, used, has_code) in names.files.items():
            for included, target in includes_of(file, names.spec):
                given = names.provided(target)  # nothing by a file of assertions
                is_needed = not has_code or not given or used & given
                (needed if is_needed else unused).add((file, included))
    return unused - needed


@cache
def names_of_all() -> list[Names]:
    """Return the names of a kernel of every choice of files."""
    return [Names(variant) for variant in variants()]


def test_no_include_is_unused() -> None:
    """Every `#include` names a file of which some kernel's code uses a name."""
    assert unused_includes(names_of_all()) == set()


def test_no_include_is_missing() -> None:
    """A name is used only where a file that defines it is included, not by way of another file."""
    missing = {
        (name, symbol)
        for names in names_of_all()
        for name in names.files
        for symbol in names.missing(name)
    }
    assert missing == set()


SHARED = """// One.
#include "common/types.cuh"
#include "ptx/arithmetic.cuh"

struct One {
  u32 ceil_div;  // a member has a name of its own
};
template <typename T>
__device__ constexpr One one(T value) { return {value.ex2_approx(7)}; }
"""


def test_the_scan_knows_definitions_and_uses() -> None:
    """Members and comments are no uses; types, constants and calls are."""
    assert defined_names(SHARED) == {"One", "one"}
    assert {"u32", "One", "one"} <= used_names(SHARED)
    assert not {"ceil_div", "ex2_approx", "types"} & used_names(SHARED)
