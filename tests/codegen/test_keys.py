"""A kernel has one key and one cubin wherever it is compiled, and no other kernel has its key."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from jinja2 import UndefinedError

import mlagen
from mlagen import engine
from mlagen.cache.key import CacheKey
from mlagen.codegen.render import render
from mlagen.codegen.sources import template_root
from mlagen.compiler import nvrtc as nvrtc_module
from mlagen.compiler import toolchain as toolchain_module
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.engine import find_or_build, key_of
from mlagen.settings import current_settings
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
from mlagen.spec.families import FAMILIES, specs_of
from mlagen.spec.mla.sm90 import MlaSm90Spec
from tests.cache.builds import ROOT
from tests.fixture_types import Patch
from tests.kernels import (
    COMBINE,
    KERNELS,
    SM_80,
    SM_90A,
    clear_caches,
    complaints,
)

FIXED = "nvrtc-13.5.37"
RELATIVES = ["mla_sm90", "mla_sm90_fp8", "mla_sm90_fp8kv"]


# Runs in a fresh interpreter: the keys of a few kernels, and the cubins of two, compiled by
# concurrent threads.
REPORT = """
import hashlib, json, sys
sys.path[:0] = [sys.argv[1]]
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
import mlagen
from mlagen.engine import find_or_build, key_of
from mlagen.spec.arch import Arch
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
from mlagen.spec.families import specs_of
assert mlagen.__file__.startswith(sys.argv[1]), mlagen.__file__
small = CombineSpec(arch=Arch(80), dtype=DType.BF16, head_dim_vo=512)
two = [small, replace(small, head_dim_vo=128)]
keys = {str(spec): key_of(spec).digest for spec in [*two, *specs_of(Arch(90, "a"))[::97]]}
with ThreadPoolExecutor(4) as pool:
    entries = list(pool.map(lambda spec: find_or_build(spec).entry, two * 2))
codes = [hashlib.sha256(entry.cubin).hexdigest() for entry in entries]
print(json.dumps({"keys": keys, "codes": codes}))
"""


def report(tree: Path, folder: Path, **environ: str) -> dict[str, Any]:
    """Return the keys and the cubin digests of a process with that mlagen in ``folder``."""
    folder.mkdir()
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", REPORT, str(tree)],
        cwd=folder,
        env={**inherited, "MLAGEN_CACHE_DIR": str(folder / "cache"), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, complaints(done.stderr)) == (0, [])
    return cast("dict[str, Any]", json.loads(done.stdout))


@pytest.mark.timeout(60)
def test_keys_and_code_are_the_same_in_every_process_and_place(tmp_path: Path) -> None:
    """Path, folder, locale, time zone, home and hash seed change neither of them."""
    copy = tmp_path / "a copy elsewhere"
    for name in ("mlagen", "templates"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored, copy_function=shutil.copyfile)

    reports = [
        report(ROOT, tmp_path / "one", PYTHONHASHSEED="0", LC_ALL="C", TZ="UTC"),
        report(copy, tmp_path / "two", PYTHONHASHSEED="1", LC_ALL="C.UTF-8", TZ="Asia/Tokyo"),
        report(copy, tmp_path / "zwölf", PYTHONHASHSEED="random", HOME="/nowhere", COLUMNS="9"),
    ]

    assert reports[0] == reports[1] == reports[2]
    assert len(reports[0]["keys"]) > 5
    assert len(set(reports[0]["codes"])) == 2
    assert reports[0]["keys"][str(COMBINE)] == key_of(COMBINE).digest
    code = hashlib.sha256(find_or_build(COMBINE).entry.cubin).hexdigest()
    assert reports[0]["codes"][0] == code


def keys_now() -> dict[str, CacheKey]:
    """Return the key of one kernel of each family, made anew."""
    clear_caches()
    return {name: engine._key_of.__wrapped__(spec, FIXED) for name, spec in KERNELS.items()}


def test_no_two_kernels_share_a_key() -> None:
    """The kernels of one architecture, and some of another, have different keys."""
    specs = [spec for arch in (SM_80, SM_90A) for spec in specs_of(arch)]
    digests = {engine._key_of.__wrapped__(spec, FIXED).digest for spec in specs}
    assert len(digests) == len(set(specs)) == len(specs)
    assert {spec.family for spec in specs} == set(FAMILIES) == set(KERNELS)


# Prints the keys of a package whose specs and code have no docstring and no comment.
BARE = """
import ast, json, pathlib, sys
package = pathlib.Path(sys.argv[1], "mlagen")
for path in [*package.glob("spec/**/*.py"), *package.glob("codegen/*.py")]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
            if isinstance(node, ast.Module):
                del node.body[0]
    path.write_text(ast.unparse(tree))
sys.path[:0] = [sys.argv[1]]
from mlagen import engine
from mlagen.spec.text import parse_spec
assert engine.__file__.startswith(sys.argv[1])
keys = [engine._key_of(parse_spec(kernel), sys.argv[2]).digest for kernel in sys.argv[3:]]
print(json.dumps(keys))
"""


def test_docstrings_and_comments_of_the_package_are_not_part_of_a_key(tmp_path: Path) -> None:
    """A key is made of facts, so only those of a template's files and specs recompile it."""
    for name in ("mlagen", "templates"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", BARE, str(tmp_path), FIXED, *map(str, KERNELS.values())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [key.digest for key in keys_now().values()]


def _template(name: str, line: str = "// edited") -> Callable[[Path, Patch], object]:
    def edit(templates: Path, _: Patch) -> None:
        with (templates / name).open("a") as file:
            file.write(f"{line}\n")

    return edit


def _attribute(owner: object, name: str, value: object) -> Callable[[Path, Patch], object]:
    return lambda _, patch: patch.setattr(owner, name, value)


# What is changed, the label of the key field that says so, and the families that depend on it.
CHANGES: dict[str, tuple[Callable[[Path, Patch], object], str, list[str]]] = {
    "a fact": (_attribute(MlaSm90Spec, "max_ranges", 132), "fact.max_ranges", RELATIVES),
    "a name in CUDA": (
        _attribute(DType, "cuda_name", property(lambda dtype: dtype.value)),
        "fact.",
        sorted(FAMILIES),
    ),
    "a parameter": (
        _attribute(CombineSpec, "common_parameters", CombineSpec.common_parameters[1:]),
        "fact.declarations",
        ["combine"],
    ),
    "what only a launch reads": (_attribute(MlaSm90Spec, "max_small_blocks", None), "", []),
    "whether a parameter is constant": (
        _attribute(
            CombineSpec,
            "common_parameters",
            tuple(replace(one, is_constant=True) for one in CombineSpec.common_parameters),
        ),
        "",
        [],
    ),
    "what codegen emits": (_attribute(engine, "CODEGEN", "0"), "codegen", sorted(FAMILIES)),
    "an option": (_attribute(toolchain_module, "_OPTIONS", ()), "option.", sorted(FAMILIES)),
    "a template of one": (_template("kernels/combine/combine.cuh"), "templates", ["combine"]),
    "a template with Jinja": (
        _template("kernels/mla_sm80/config.cuh.j2"),
        "templates",
        ["mla_sm80"],
    ),
    "a template of several": (
        _template("scheduler/tile_scheduler.cuh"),
        "templates",
        RELATIVES,
    ),
    "a template of all": (_template("common/types.cuh"), "templates", sorted(FAMILIES)),
    "an include on another branch": (
        _template("common/fp8.cuh.j2"),
        "templates",
        sorted(FAMILIES.keys() - {"mla_sm90"}),
    ),
    "an include of an include": (
        _template("softmax/row_state.cuh", '#include "ptx/atomic.cuh"'),
        "templates",
        sorted(FAMILIES.keys() - {"write_rows"}),
    ),
    "a template renamed": (
        lambda root, _: (root / "common/types.cuh").rename(root / "common/types.cuh.j2"),
        "templates",
        sorted(FAMILIES),
    ),
    "another file": (_template("README.md"), "", []),
}


@pytest.mark.parametrize(("change", "label", "families"), CHANGES.values(), ids=CHANGES)
def test_what_a_kernel_is_made_of_is_in_its_key(
    change: Callable[[Path, Patch], object],
    label: str,
    families: list[str],
    templates: Path,
    monkeypatch: Patch,
) -> None:
    """A change compiles the kernels that depend on it, and no other; the key says what it was."""
    before = keys_now()
    with monkeypatch.context() as patch:
        change(templates, patch)
        after = keys_now()
    changed = {
        name: [row[0] for row in key.differences(before[name])]
        for name, key in after.items()
        if key.digest != before[name].digest
    }
    assert sorted(changed) == families
    assert all(row.startswith(label) for rows in changed.values() for row in rows)


def test_a_template_reads_plain_data_alone(templates: Path) -> None:
    """A method, an object or another name of the spec is an error, never part of a kernel."""
    config = templates / "kernels/combine/config.cuh.j2"
    text = config.read_text()
    for tag, error in {
        "{{ spec.serves }}": TypeError,
        "{{ spec.arch }}": TypeError,
        "{% set alias = spec %}{{ alias.threads_of }}": UndefinedError,
        "{% set alias = spec %}{{ alias.arch.number }}": UndefinedError,
    }.items():
        config.write_text(text + tag)
        clear_caches()
        with pytest.raises(error):
            render(COMBINE)


def _touch(templates: Path) -> None:
    for path in templates.rglob("*.cuh"):
        path.chmod(0o400)
        os.utime(path, (1, 1))
    (templates / "README.md").write_text("Another text.\n")
    (templates / "common/types.cuh~").write_text("A backup of an editor.\n")


VARIABLES = {
    **dict.fromkeys(("MLAGEN_CACHE_DIR", "MLAGEN_LOCK_DIR", "MLAGEN_CACHE_RO"), "/elsewhere"),
    **dict.fromkeys(("MLAGEN_TRUST_SHARED", "MLAGEN_CHECK"), "1"),
    "MLAGEN_CACHE_MAX_SIZE": "1M",
    "MLAGEN_JIT": "error",
    "MLAGEN_RECORD": "/elsewhere/record",
    "CUDA_VISIBLE_DEVICES": "7",
}


def test_unrelated_changes_are_not_part_of_the_key(templates: Path, monkeypatch: Patch) -> None:
    """Places, policies, times, host and version change no key."""
    before = key_of(COMBINE)
    with monkeypatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        patch.chdir(templates)
        patch.setattr(mlagen, "__version__", "9.9.9")
        patch.setattr(os, "uname", lambda: None)
        _touch(templates)
        current_settings.cache_clear()
        clear_caches()
        after = key_of(COMBINE)
    assert (after, after.digest) == (before, before.digest)


def test_the_input_of_the_compiler_is_in_the_key(monkeypatch: Patch) -> None:
    """Source, options and a constant name are the whole input of NVRTC."""
    given: list[tuple[str, str, list[str]]] = []
    bindings = nvrtc_module.load_nvrtc(find_nvrtc())
    create, compile_program = bindings.nvrtcCreateProgram, bindings.nvrtcCompileProgram

    def note_source(text: bytes, name: bytes, *headers: object) -> Any:
        assert headers == (0, [], [])
        given.append((text.decode(), name.decode(), []))
        return create(text, name, *headers)

    def note_options(program: object, count: int, options: list[bytes]) -> Any:
        given[-1][2].extend(option.decode() for option in options)
        return compile_program(program, count, options)

    monkeypatch.setattr(bindings, "nvrtcCreateProgram", note_source)
    monkeypatch.setattr(bindings, "nvrtcCompileProgram", note_options)

    outcome = find_or_build(replace(COMBINE, head_dim_vo=256))

    ((text, name, options),) = given
    assert name == nvrtc_module.PROGRAM_NAME
    assert os.fspath(template_root()) not in text
    in_key = dict(key_of(replace(COMBINE, head_dim_vo=256)).key_fields)
    parts = [option.lstrip("-").partition("=") for option in options]
    assert {f"option.{option}": value for option, _, value in parts} == {
        label: value for label, value in in_key.items() if label.startswith("option.")
    }
    assert outcome.entry.manifest.toolchain == str(find_nvrtc())
