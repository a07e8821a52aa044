"""Prewarming: selection, one compile per kernel, events and failures."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import mlagen
from mlagen import engine
from mlagen.artifacts import Build
from mlagen.prewarming import PrewarmEvent, run
from mlagen.settings import current_settings
from mlagen.spec.kernel import KernelSpec

ROOT = Path(__file__).resolve().parents[1]

# Two kernels that compile in 0.1 s each.
SMALL: dict[str, Any] = {"archs": "sm_80", "families": ["combine"], "dtype": "bf16"}
SMALL |= {"kv_lora_rank": [512, 256]}
build = engine.build_spec


def test_each_kernel_is_built_once_and_found_after() -> None:
    """A second prewarm, and a call, find the kernel with the same facts."""
    alone = mlagen.prewarm(**{**SMALL, "kv_lora_rank": 512})
    first, second = mlagen.prewarm(**SMALL), mlagen.prewarm(**SMALL)

    statuses = [[unit.status for unit in report.units] for report in (alone, first, second)]
    assert statuses == [["built"], ["hit", "built"], ["hit", "hit"]]
    facts = [
        [(unit.key, unit.registers, unit.spill_bytes, unit.cubin_bytes) for unit in report.units]
        for report in (first, second)
    ]
    assert facts[0] == facts[1]
    assert all(registers and spills == 0 for _, registers, spills, _ in facts[0])
    counts = {"units": 2, "hit": 1, "built": 1, "failed": 0}
    assert first.totals().items() >= counts.items()
    for unit in first.units:
        outcome = engine.find_or_build(unit.spec)
        assert (outcome.built, outcome.entry.manifest.key) == (False, unit.key)
        assert outcome.entry.manifest.created_by == "prewarm"


def test_a_dry_run_compiles_and_creates_nothing(cache_dir: Path) -> None:
    """It reports missing kernels and damaged ones, which only a build deletes."""
    report = mlagen.prewarm(**SMALL, dry_run=True)
    is_created = cache_dir.exists() or current_settings().lock_dir.exists()
    (built, *_) = mlagen.prewarm(**SMALL).units
    found = engine.find_or_build(built.spec).entry
    assert found.path is not None
    found.path.write_bytes(b"damaged")

    again = mlagen.prewarm(**SMALL, dry_run=True)

    assert ([unit.status for unit in report.units], is_created) == (["missing", "missing"], False)
    assert again.units[0].status == "missing"
    assert found.path.read_bytes() == b"damaged"


def test_events_come_in_the_calling_thread_and_in_order() -> None:
    """All kernels are missing before one starts, each starts before it finishes, and all count."""
    events: list[PrewarmEvent] = []
    threads = set()

    def on_event(event: PrewarmEvent) -> None:
        events.append(event)
        threads.add(threading.get_ident())

    report = mlagen.prewarm(**SMALL, jobs=2, on_event=on_event)

    assert threads == {threading.get_ident()}
    for unit in report.units:
        kinds = [event.kind for event in events if event.spec == unit.spec]
        assert kinds == ["missing", "started", "finished"]
    assert [event.kind for event in events[:2]] == ["missing", "missing"]
    assert [event.done for event in events if event.kind == "finished"] == [1, 2]
    assert {event.total for event in events} == {2}


def test_a_failing_kernel_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has its error; an exception that is no MlagenError is a bug, and is raised."""

    def fail_at_512(spec: KernelSpec, nvrtc: Any, *_: object) -> Build:
        if spec.key_fields()["head_dim_vo"] == "512":
            raise mlagen.CompileError("NVRTC: no such thing", log="", source="")
        return build(spec, nvrtc)

    monkeypatch.setattr(engine, "build_spec", fail_at_512)
    units = mlagen.prewarm(**SMALL).units
    monkeypatch.setattr(engine, "build_spec", None)

    found = {
        unit.spec.key_fields()["head_dim_vo"]: (unit.status, str(unit.error)) for unit in units
    }
    assert found == {"512": ("failed", "NVRTC: no such thing"), "256": ("built", "None")}
    with pytest.raises(TypeError, match="not callable"):
        mlagen.prewarm("sm_86", families=["combine"])


def test_an_exception_in_the_callback_cancels_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one job, compilations do not overlap, and those that have not started never do."""
    compiling, builds = threading.Lock(), []

    def alone(spec: KernelSpec, nvrtc: Any, *_: object) -> Build:
        assert compiling.acquire(blocking=False)
        builds.append(spec)
        try:
            return build(spec, nvrtc)
        finally:
            compiling.release()

    def interrupt(event: PrewarmEvent) -> None:
        if event.kind == "finished":
            raise KeyboardInterrupt

    monkeypatch.setattr(engine, "build_spec", alone)
    report = mlagen.prewarm(**SMALL, jobs=1)
    with pytest.raises(KeyboardInterrupt):
        mlagen.prewarm("sm_86,sm_90a", families=["combine"], jobs=1, on_event=interrupt)

    assert [unit.status for unit in report.units] == ["built"] * 2
    assert 2 + 1 <= len(builds) < 2 + 8


def test_a_kernel_built_before_an_interrupt_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the interrupt comes while its build is being submitted."""
    submit, kept = ThreadPoolExecutor.submit, []

    def interrupted(*args: Any) -> None:
        submit(*args).result()
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mlagen.prewarm(**SMALL, on_event=lambda event: kept.append(event.unit))

    assert [unit.status for unit in kept if unit is not None] == ["built"]


def test_a_read_only_cache_is_rejected_before_compiling(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prewarm that could not store its kernels raises at once, with the path."""
    cache_dir.write_text("a file where the folder should be")
    monkeypatch.setattr(engine, "build_spec", None)  # calling it would fail
    rule = f"^cache: expected a writable folder, got .*: {cache_dir}$"
    with pytest.raises(mlagen.CacheError, match=rule) as raised:
        mlagen.prewarm(**SMALL)
    assert raised.value.path == cache_dir


def test_an_entry_that_could_not_be_published_is_a_failure(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up fails the kernels one by one."""

    def reject(*_: object, **__: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlagen.cache.folder.Folder.publish", reject)

    report = mlagen.prewarm(**{**SMALL, "kv_lora_rank": 512})

    message = f"cache: expected an entry on the disk, got none: {cache_dir}"
    assert [(unit.status, str(unit.error)) for unit in report.units] == [("failed", message)]


def test_without_nvrtc_cached_kernels_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every kernel cached, a prewarm needs no compiler; a missing one is reported at once."""

    def missing() -> None:
        raise mlagen.ToolchainError("NVRTC: not here")

    mlagen.prewarm(**SMALL)
    monkeypatch.setattr(run, "find_nvrtc", missing)

    assert [unit.status for unit in mlagen.prewarm(**SMALL).units] == ["hit", "hit"]
    with pytest.raises(mlagen.ToolchainError, match="NVRTC: not here"):
        mlagen.prewarm(**{**SMALL, "dtype": "fp16"})


def test_prewarming_loads_no_torch() -> None:
    """Prewarming works without torch, and does not wait for its import."""
    script = (
        "import sys; sys.modules['torch'] = None; import mlagen; "
        "report = mlagen.prewarm('sm_80', families=['combine'], kv_lora_rank=512); "
        "sys.exit(report.totals()['built'] != 2)"
    )
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
