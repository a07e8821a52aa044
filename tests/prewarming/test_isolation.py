"""Isolation: what a kernel's own process brings back, and what it is not started for."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

import mlagen
from mlagen import engine
from mlagen.prewarming.build import build_here
from mlagen.prewarming.isolation import unit_text
from mlagen.prewarming.report import unit_of
from tests.kernels import COMBINE, SM_80
from tests.prewarming.isolated import OTHER, prewarm, replace_worker


def test_a_kernel_is_built_in_a_process_of_its_own_and_found_here() -> None:
    """With the same facts as a kernel built here, and the same entry."""
    unit = prewarm(COMBINE)[COMBINE]

    outcome = engine.find_or_build(COMBINE)
    here = build_here(COMBINE)
    assert unit.status == "built"
    assert outcome.built is False
    assert outcome.entry.manifest.created_by == "prewarm"
    assert outcome.entry.manifest.created["pid"] != os.getpid()
    facts = [(u.key, u.toolchain, u.registers, u.spill_bytes, u.cubin_bytes) for u in (unit, here)]
    assert facts[0] == facts[1]


def test_what_the_cache_has_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second prewarm starts nothing."""
    build_here(COMBINE)
    replace_worker(monkeypatch, "raise SystemExit(1)", of=None)

    assert prewarm(COMBINE)[COMBINE].status == "hit"


def test_a_worker_that_would_log_much_adds_no_warnings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MLAGEN_LOG is for this process: what a worker writes to stderr becomes a warning here."""
    monkeypatch.setenv("MLAGEN_LOG", "debug")

    assert prewarm(COMBINE)[COMBINE].status == "built"
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize(
    "error",
    [
        mlagen.CompileError("NVRTC: no", log="line 1", source="code"),
        mlagen.ToolchainError("arch: no"),
        mlagen.MissError("no"),
        mlagen.CacheError("cache: no", path=Path("/x")),
        mlagen.DriverError("no", symbol="cuInit"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_a_worker_is_the_same_here(
    error: mlagen.MlagenError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class, its message and what it carries come over."""
    key = engine.key_of(COMBINE)
    failed = unit_of(COMBINE, key, "failed", 0.0, error=error)
    replace_worker(monkeypatch, f"print({unit_text(failed)!r})")

    told = prewarm(COMBINE)[COMBINE].error

    assert type(told) is type(error)
    assert (str(told), vars(told)) == (str(error), vars(error))


def test_a_real_worker_tells_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the environment forbids to compile, for instance."""
    monkeypatch.setenv("MLAGEN_JIT", "off")

    unit = prewarm(COMBINE)[COMBINE]

    assert unit.status == "failed"
    assert isinstance(unit.error, mlagen.MissError)
    assert "MLAGEN_JIT=off forbids to compile" in str(unit.error)


def test_the_first_failure_may_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has not begun is skipped, and says so."""
    replace_worker(monkeypatch, "raise SystemExit(1)")

    units = prewarm(COMBINE, OTHER, jobs=1, fail_fast=True)

    assert [unit.status for unit in units.values()] == ["failed", "skipped"]
    assert units[OTHER].error is None


def test_a_cache_that_cannot_be_written_is_told_even_with_load(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one process to another, kernels go by the disk."""
    cache_dir.write_text("a file where the folder should be")
    monkeypatch.setattr("mlagen.prewarming.run.devices_for", lambda _specs: {0: SM_80})

    with pytest.raises(mlagen.CacheError, match=r"^cache: expected a writable folder, got "):
        prewarm(COMBINE, load=True)


def test_what_a_worker_warns_of_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if it had happened here."""
    unit = build_here(OTHER)
    code = f"import sys; print({unit_text(unit)!r}); print('cache: moved', file=sys.stderr)"
    replace_worker(monkeypatch, code)

    prewarm(COMBINE)

    assert caplog.messages == ["cache: moved"]


def test_a_process_that_cannot_be_started_fails_its_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine may have no room for more of them."""

    def reject(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", reject)

    unit = prewarm(COMBINE)[COMBINE]

    assert unit.status == "failed"
    assert str(unit.error) == f"worker: expected a process, got {os.strerror(errno.EAGAIN)}"
