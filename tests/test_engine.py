"""From a spec to a kernel with the real compiler: keys, warm processes, races, kills, damage."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from mlagen import engine
from mlagen.cache.default_store import kernel_store
from mlagen.compiler.toolchain import find_nvrtc, options_for
from mlagen.engine import find_or_build, kernel_for, key_of
from mlagen.errors import CompileError
from mlagen.runtime.loader import LoadedKernel
from mlagen.spec.kernel import KernelSpec
from tests.cache.builds import ROOT, together, tree, wait_for
from tests.kernels import COMBINE, WIDE_DECODE, clear_caches, mla_sm80

# Runs in a fresh interpreter on COMBINE; a warm process must not load the named modules.
LOADED = """
import json, sys
import mlagen.engine
from mlagen.spec.arch import Arch
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
spec = CombineSpec(arch=Arch(80), dtype=DType.BF16, head_dim_vo=512)
outcome = getattr(mlagen.engine, sys.argv[1])(spec)
heavy = ("jinja2", "cuda.bindings.driver", "cuda.bindings.nvrtc", "torch", "numpy")
built = getattr(outcome, "built", None)
print(json.dumps({"built": built, "loaded": [name for name in heavy if name in sys.modules]}))
"""


def in_fresh_process(function: str) -> dict[str, Any]:
    """Call a function of the engine on COMBINE in a new interpreter; return the loaded modules."""
    command = [sys.executable, "-c", LOADED, function]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return cast("dict[str, Any]", json.loads(done.stdout))


def start_worker(folder: Path) -> subprocess.Popen[str]:
    """Start a process that requests WIDE_DECODE; see ``engine_worker.py``."""
    command = [sys.executable, "-m", "tests.engine_worker", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def logged(folder: Path, word: str) -> list[int]:
    """Return the process id of each log line that begins with ``word``.

    The warning of a slow compilation is omitted: a busy machine may add one.
    """
    log = folder / "log"
    text = log.read_text() if log.exists() else ""
    return [int(pid) for pid in re.findall(rf"^(\d+) {word} (?!.* so far; )", text, re.MULTILINE)]


def test_a_key_is_made_without_rendering_and_compiling(cache_dir: Path) -> None:
    """A key needs no Jinja, no bindings and no torch, and touches no cache folder."""
    process = in_fresh_process("key_of")

    assert process["loaded"] == []
    assert not cache_dir.exists()


def test_a_warm_process_loads_neither_jinja_nor_nvrtc() -> None:
    """A cached kernel loads without Jinja, NVRTC, its bindings or torch."""
    find_or_build(COMBINE)

    process = in_fresh_process("find_or_build")

    assert process == {"built": False, "loaded": []}


def test_every_key_field_has_a_label() -> None:
    """The key has labels for the family, each spec field, each option and the templates."""
    spec = mla_sm80()
    nvrtc = str(find_nvrtc())

    key = key_of(spec)

    labels = [label for label, _ in key.key_fields]
    options = [option.lstrip("-").split("=")[0] for option in options_for(spec.arch, nvrtc)]
    assert labels == [
        "family",
        *(f"spec.{name}" for name in spec.key_fields()),
        *(f"option.{name}" for name in options),
        "templates",
    ]
    assert len(set(labels)) == len(labels)
    assert dict(key.key_fields).items() >= {
        ("family", "mla_sm80"),
        ("spec.arch", "sm_90a"),
        ("spec.query_dtype", "bf16"),
        ("spec.page_size", "64"),
        ("option.gpu-architecture", "sm_90a"),
        ("option.std", "c++17"),
        ("option.fmad", "true"),
    }
    assert key.toolchain == nvrtc


@pytest.mark.parametrize(
    ("other", "label"),
    [
        (mla_sm80(page_size=32), "spec.page_size"),
        (mla_sm80(rows=128), "spec.block_m"),
    ],
    ids=["another page size", "another tile"],
)
def test_kernels_that_differ_have_keys_that_differ(other: KernelSpec, label: str) -> None:
    """A differing spec field is a differing key field."""
    mine, theirs = key_of(mla_sm80()), key_of(other)

    differences = mine.differences(theirs)

    assert mine.digest != theirs.digest
    assert label in {difference[0] for difference in differences}


def test_editing_a_template_changes_the_key(templates: Path) -> None:
    """An edited template changes the key's template digest."""
    before = key_of(COMBINE)
    prelude = templates / "common/types.cuh"
    prelude.write_text(prelude.read_text() + "// edited\n")
    clear_caches()

    after = key_of(COMBINE)

    assert after.digest != before.digest
    assert [label for label, _, _ in after.differences(before)] == ["templates"]


def test_an_entry_describes_its_kernel(cache_dir: Path) -> None:
    """The manifest has symbol, spec and ptxas' resources; the cubin is an ELF file."""
    outcome = find_or_build(COMBINE, created_by="prewarm")

    entry = outcome.entry
    assert outcome.built
    assert outcome.ms > 0
    assert entry.cubin.startswith(b"\x7fELF")
    assert entry.path is not None
    assert entry.path.is_relative_to(cache_dir)
    assert entry.manifest.created_by == "prewarm"
    facts = entry.manifest.facts
    assert facts["kernel"] == {
        "symbol": "combine",
        "spec": COMBINE.key_fields(),
        "dynamic_shared_bytes": 0,
    }
    (resources,) = facts["resources"]
    assert resources["symbol"] == "combine"
    assert resources["registers"] > 0
    assert resources["static_shared_bytes"] == 4 * 4 + 4 * 32 * 16  # the struct of combine.cuh


def test_building_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A build logs its kernel and its duration at INFO; a hit logs nothing."""
    caplog.set_level(logging.INFO, logger="mlagen")

    find_or_build(COMBINE)
    find_or_build(COMBINE)

    first, second = (record.getMessage() for record in caplog.records)
    assert first == f"compiling {COMBINE} with {find_nvrtc()}: absent in {kernel_store().root}"
    assert re.fullmatch(rf"compiled {re.escape(str(COMBINE))} in \d+\.\d s", second)


@pytest.mark.timeout(60)
def test_sixteen_processes_run_one_compile(tmp_path: Path) -> None:
    """Of processes that start on an empty cache, one runs NVRTC and all get the same bytes."""
    workers = [start_worker(tmp_path) for _ in range(16)]
    wait_for(lambda: len(list(tmp_path.glob("ready.*"))) == 16, seconds=40)

    (tmp_path / "go").touch()
    digests = [worker.communicate(timeout=30)[0].strip() for worker in workers]

    assert [worker.returncode for worker in workers] == [0] * 16
    assert len(logged(tmp_path, "compiling")) == 1
    assert len(logged(tmp_path, "compiled")) == 1
    assert set(digests) == {hashlib.sha256(find_or_build(WIDE_DECODE).entry.cubin).hexdigest()}


@pytest.mark.timeout(60)
def test_killing_the_compiling_process_lets_the_others_finish(tmp_path: Path) -> None:
    """After kill -9 during NVRTC, one waiting process compiles, and nothing is left over."""
    workers = [start_worker(tmp_path) for _ in range(4)]
    wait_for(lambda: len(list(tmp_path.glob("ready.*"))) == 4, seconds=30)
    (tmp_path / "go").touch()
    wait_for(lambda: logged(tmp_path, "compiling"))

    (victim,) = logged(tmp_path, "compiling")
    os.kill(victim, signal.SIGKILL)
    digests = {worker.pid: worker.communicate(timeout=30)[0].strip() for worker in workers}

    statuses = {worker.pid: worker.returncode for worker in workers}
    assert statuses.pop(victim) == -signal.SIGKILL
    assert digests.pop(victim) == ""
    assert set(statuses.values()) == {0}
    assert len(logged(tmp_path, "compiling")) == 2
    assert len(logged(tmp_path, "compiled")) == 1
    assert set(digests.values()) == {
        hashlib.sha256(find_or_build(WIDE_DECODE).entry.cubin).hexdigest()
    }


def test_a_flipped_byte_is_found_and_the_kernel_is_rebuilt(
    cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged cubin costs a warning and a compile, and is replaced."""
    intact = find_or_build(COMBINE).entry
    assert intact.path is not None
    stored = intact.path / "kernel.cubin"
    damaged = bytearray(intact.cubin)
    damaged[len(damaged) // 2] ^= 0x10
    stored.chmod(0o600)
    stored.write_bytes(damaged)

    outcome = find_or_build(COMBINE)

    assert outcome.built
    assert outcome.entry.cubin == intact.cubin
    assert stored.read_bytes() == intact.cubin
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "kernel.cubin" in warnings[0].getMessage()
    (quarantined,) = (cache_dir / "v1/quarantine").iterdir()
    assert [path.read_bytes() for path in quarantined.rglob("kernel.cubin")] == [bytes(damaged)]
    assert "kernel.cubin" in (quarantined / "reason.json").read_text()


def test_a_kernel_that_does_not_compile_stores_nothing(templates: Path, cache_dir: Path) -> None:
    """The error has the template's line, no entry appears, and the fixed template builds."""
    role = templates / "kernels/combine/combine.cuh"
    intact = role.read_text()
    line = 1 + intact[: intact.index("__device__")].count("\n")
    role.write_text(intact.replace("__device__", "undefined_type broken; __device__", 1))
    clear_caches()

    with pytest.raises(CompileError) as caught:
        find_or_build(COMBINE)
    left = [path for path in tree(cache_dir) if path.endswith((".cubin", ".json"))]
    role.write_text(intact)
    clear_caches()
    outcome = find_or_build(COMBINE)

    assert f"kernels/combine/combine.cuh:{line} (kernel.cu:" in str(caught.value)
    assert left == []
    assert outcome.built


def test_a_loaded_kernel_is_returned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path ends in the table of loaded kernels, without a key or a store lookup."""
    loaded = LoadedKernel.__new__(LoadedKernel)
    monkeypatch.setitem(engine._loaded, (COMBINE, 0), loaded)
    monkeypatch.setattr(engine, "find_or_build", None)

    assert kernel_for(COMBINE, 0) is loaded


def test_threads_load_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many concurrent threads, one loads and all get the same object."""
    loads = []

    def load(code: bytes, spec: KernelSpec, device: int) -> object:
        loads.append((code, spec, device))
        return object()

    monkeypatch.setattr(engine, "_loaded", {})
    monkeypatch.setattr("mlagen.runtime.loader.load", load)
    monkeypatch.setattr("mlagen.runtime.loader.require_no_capture", lambda *_: None)

    kernels = together([lambda: kernel_for(COMBINE, 3)] * 16)

    assert loads == [(find_or_build(COMBINE).entry.cubin, COMBINE, 3)]
    assert len(set(map(id, kernels))) == 1


def test_the_store_is_the_folder_of_the_settings(cache_dir: Path) -> None:
    """Built kernels are below MLAGEN_CACHE_DIR, and listed by the store."""
    find_or_build(COMBINE)

    (stored,) = kernel_store().entries()

    assert stored.key == key_of(COMBINE).digest
    assert stored.path.is_relative_to(cache_dir)
