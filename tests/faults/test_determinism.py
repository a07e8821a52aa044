"""A kernel has one key and one cubin wherever it is compiled, and no other kernel has its key."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import mlagen
from mlagen import engine
from mlagen.codegen.sources import template_root
from mlagen.compiler import nvrtc as nvrtc_module
from mlagen.compiler import toolchain as toolchain_module
from mlagen.compiler.nvrtc_library import Compiled, NvrtcLibrary
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.engine import find_or_build, key_of
from mlagen.settings import current_settings
from mlagen.spec.families import FAMILIES, specs_of
from tests.cache.builds import ROOT
from tests.fixture_types import Patch
from tests.kernels import (
    COMBINE,
    SM_80,
    SM_90A,
    clear_caches,
    complaints,
)

# Of COMBINE for this compiler. A version of mlagen with another key recompiles every kernel,
# so a change of this line must be intended.
GOLDEN = "b38176135aa2303a9f9a090fa16a86427d4f10b313053a482c4b5044e34c5bba"
FIXED = "nvrtc-13.5.37"


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


def test_a_key_never_changes(monkeypatch: Patch) -> None:
    """With the same templates, the next version of mlagen finds the kernels."""
    monkeypatch.setattr(engine, "template_digest", lambda _: "0" * 64)
    key = engine._key_of.__wrapped__(COMBINE, FIXED)
    assert key.digest == GOLDEN


def test_no_two_kernels_share_a_key(monkeypatch: Patch) -> None:
    """The kernels of one architecture, and some of another, have different keys."""
    specs = [spec for arch in (SM_80, SM_90A) for spec in specs_of(arch)]
    monkeypatch.setattr(engine, "template_digest", lambda _: "0" * 64)
    digests = {engine._key_of.__wrapped__(spec, FIXED).digest for spec in specs}
    assert len(digests) == len(set(specs)) == len(specs)
    assert {spec.family for spec in specs} == set(FAMILIES)


@pytest.mark.parametrize("number", range(len(toolchain_module._OPTIONS)))
def test_every_compiler_option_is_part_of_the_key(number: int, monkeypatch: Patch) -> None:
    """Removing or changing an option changes the key, which names the option."""
    options = toolchain_module._OPTIONS
    before = engine._key_of.__wrapped__(COMBINE, FIXED)
    name = options[number].partition("=")[0]

    changed = []
    for instead in ((f"{name}=another",), ()):
        monkeypatch.setattr(
            toolchain_module, "_OPTIONS", (*options[:number], *instead, *options[number + 1 :])
        )
        changed.append(engine._key_of.__wrapped__(COMBINE, FIXED))

    assert len({before.digest, *(key.digest for key in changed)}) == 3
    label = f"option.{name.lstrip('-')}"
    assert [[row[0] for row in key.differences(before)] for key in changed] == [[label]] * 2


def _include(root: Path) -> None:
    file = root / "softmax/row_state.cuh"
    file.write_text(file.read_text() + '\n#include "ptx/atomic.cuh"\n')


EDITS: dict[str, Callable[[Path], object]] = {
    "a template edited": lambda root: (root / "common/types.cuh").write_text("// edited\n"),
    "a template included": _include,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_every_template_is_part_of_the_key(edit: Callable[[Path], object], templates: Path) -> None:
    """All templates and rendering code are one key field."""
    before = key_of(COMBINE)
    edit(templates)
    clear_caches()
    after = key_of(COMBINE)
    assert after.digest != before.digest
    assert [label for label, _, _ in after.differences(before)] == ["templates"]


def _touch(templates: Path, _: Patch) -> None:
    for path in templates.rglob("*.cuh"):
        path.chmod(0o400)
        os.utime(path, (1, 1))
    (templates / "README.md").write_text("Another text.\n")
    (templates / "common/types.cuh~").write_text("A backup of an editor.\n")


def _set(name: str, value: str) -> Callable[[Path, Patch], None]:
    return lambda _, patch: patch.setenv(name, value)


OTHERS: dict[str, Callable[[Path, Patch], object]] = {
    "the current folder": lambda templates, patch: patch.chdir(templates),
    "the cache folder": _set("MLAGEN_CACHE_DIR", "/elsewhere"),
    "the lock folder": _set("MLAGEN_LOCK_DIR", "/elsewhere"),
    "read-only layers": _set("MLAGEN_CACHE_RO", "/elsewhere"),
    "who is trusted": _set("MLAGEN_TRUST_SHARED", "1"),
    "the limit": _set("MLAGEN_CACHE_MAX_SIZE", "1M"),
    "whether it may compile": _set("MLAGEN_JIT", "error"),
    "a record": _set("MLAGEN_RECORD", "/elsewhere/record"),
    "checks": _set("MLAGEN_CHECK", "1"),
    "the visible GPUs": _set("CUDA_VISIBLE_DEVICES", "7"),
    "the version of mlagen": lambda _, patch: patch.setattr(mlagen, "__version__", "9.9.9"),
    "the host": lambda _, patch: patch.setattr(os, "uname", lambda: None),
    "times and modes of templates": _touch,
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_unrelated_changes_are_not_part_of_the_key(
    change: Callable[[Path, Patch], object], templates: Path, monkeypatch: Patch
) -> None:
    """Kernels with equal cubins have equal keys."""
    before = key_of(COMBINE)
    with monkeypatch.context() as patch:
        change(templates, patch)
        current_settings.cache_clear()
        clear_caches()
        after = key_of(COMBINE)
    assert after == before
    assert after.digest == before.digest


def test_the_input_of_the_compiler_is_in_the_key(monkeypatch: Patch) -> None:
    """Source, options and a constant name are the whole input of NVRTC."""
    given: list[tuple[str, str, Sequence[str]]] = []
    real = NvrtcLibrary.compile

    def note(
        self: NvrtcLibrary, text: str, name: str, options: Sequence[str], *, result: str
    ) -> Compiled:
        given.append((text, name, options))
        return real(self, text, name, options, result=result)

    monkeypatch.setattr(NvrtcLibrary, "compile", note)

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
