"""Isolated builds: a kernel compiles in a process of its own, which may crash or hang."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import mlagen
from mlagen import engine
from mlagen.compiler import process
from mlagen.prewarming import PrewarmEvent
from mlagen.prewarming.report import PrewarmUnit
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec
from tests.cache.builds import wait_for
from tests.fixture_types import Log, Patch
from tests.kernels import COMBINE, SM_80

OTHER = CombineSpec(arch=SM_80, dtype=DType.FP16, head_dim_vo=512)


def break_compiler(monkeypatch: Patch, code: str) -> None:
    """Have each process run this code in place of NVRTC."""
    boot = process._BOOT.replace("from mlagen.", f"import time; {code}; from mlagen.", 1)
    monkeypatch.setattr(process, "_BOOT", boot)


def prewarm(*specs: KernelSpec, **options: Any) -> dict[KernelSpec, PrewarmUnit]:
    """Return the units of an isolated prewarm, of COMBINE without specs."""
    report = mlagen.prewarm(kernels=specs or [COMBINE], isolate=True, **options)
    return {unit.spec: unit for unit in report.units}


def test_a_kernel_is_compiled_in_its_process_and_published_here(
    monkeypatch: Patch, caplog: Log
) -> None:
    """Unit and entry equal those built here; MLAGEN_LOG adds no warnings."""
    monkeypatch.setenv("MLAGEN_LOG", "debug")
    compiled_here: list[object] = []
    monkeypatch.setattr("mlagen.compiler.nvrtc.compile_source", compiled_here.append)

    unit = prewarm()[COMBINE]

    outcome = engine.find_or_build(COMBINE)
    manifest = outcome.entry.manifest
    (resources,) = manifest.facts["resources"]
    assert (unit.status, outcome.built, manifest.created_by) == ("built", False, "prewarm")
    assert (unit.key, unit.toolchain) == (manifest.key, manifest.toolchain)
    assert (unit.registers, unit.cubin_bytes) == (
        resources["registers"],
        len(outcome.entry.cubin),
    )
    assert compiled_here == []
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    break_compiler(monkeypatch, "sys.exit(1)")  # a cached kernel starts none
    assert prewarm()[COMBINE].status == "hit"


def test_an_unwritable_cache_fails_before_a_process_starts(
    cache_dir: Path, monkeypatch: Patch
) -> None:
    """A prewarm without ``load`` would compile for nothing."""
    cache_dir.write_text("a file where the folder should be")
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(mlagen.CacheError, match=r"^cache: expected a writable folder, got "):
        prewarm()


def test_a_kernel_that_may_not_be_compiled_fails(monkeypatch: Patch) -> None:
    """The rule is that of this process."""
    monkeypatch.setenv("MLAGEN_JIT", "off")
    unit = prewarm()[COMBINE]
    assert (unit.status, type(unit.error)) == ("failed", mlagen.MissError)
    assert "MLAGEN_JIT=off forbids to compile" in str(unit.error)


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("os.kill(os.getpid(), 9)", "failed", "NVRTC: expected a compiled kernel, got SIGKILL"),
        ("sys.exit(3)", "failed", "NVRTC: expected a compiled kernel, got exit status 3: nothing"),
        ("time.sleep(600)", "timeout", "timeout: expected a compiled kernel in 2 s, got none"),
    ],
)
def test_a_process_that_fails_fails_its_kernel_alone(
    code: str, status: str, message: str, monkeypatch: Patch
) -> None:
    """The others are built; its lock is free, and the kernel is built the next time."""
    start = process.CompileProcesses._start

    def start_one_broken(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            if b"OutElement = Bf16" in arguments[1]:
                break_compiler(patch, code)
            return start(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(process.CompileProcesses, "_start", start_one_broken)
        units = prewarm(COMBINE, OTHER, timeout_s=2 if status == "timeout" else 60, jobs=1)
    assert (units[COMBINE].status, units[OTHER].status) == (status, "built")
    assert str(units[COMBINE].error) == message
    assert isinstance(units[COMBINE].error, mlagen.CompileError)
    assert prewarm()[COMBINE].status == "built"


def test_an_interrupted_prewarm_kills_its_processes(tmp_path: Path, monkeypatch: Patch) -> None:
    """The exception reaches the caller."""
    ready = tmp_path / "ready"
    hangs = f"open({str(ready)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    break_compiler(monkeypatch, hangs)

    def interrupt(event: PrewarmEvent) -> None:
        if event.kind == "started":
            wait_for(lambda: ready.exists() and ready.read_text())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prewarm(on_event=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(ready.read_text()), 0)
