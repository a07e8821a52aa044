"""Isolated builds: the result of a worker, and when none is started."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

import mlagen
from mlagen import engine
from mlagen.prewarming.build import build_in_process
from mlagen.prewarming.isolation import unit_to_json
from mlagen.prewarming.report import unit_of
from tests.kernels import COMBINE, SM_80
from tests.prewarming.isolated import OTHER, prewarm, replace_worker


def test_a_kernel_is_built_in_its_own_process_and_found_here() -> None:
    """The unit and the entry equal those of a kernel built in this process."""
    unit = prewarm(COMBINE)[COMBINE]

    outcome = engine.find_or_build(COMBINE)
    here = build_in_process(COMBINE)
    assert unit.status == "built"
    assert outcome.built is False
    assert outcome.entry.manifest.created_by == "prewarm"
    assert outcome.entry.manifest.created["pid"] != os.getpid()
    facts = [(u.key, u.toolchain, u.registers, u.spill_bytes, u.cubin_bytes) for u in (unit, here)]
    assert facts[0] == facts[1]


def test_a_cached_kernel_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second prewarm starts no process."""
    build_in_process(COMBINE)
    replace_worker(monkeypatch, "raise SystemExit(1)", of=None)

    assert prewarm(COMBINE)[COMBINE].status == "hit"


def test_a_worker_that_would_log_much_adds_no_warnings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MLAGEN_LOG applies to this process only, as stderr of a worker becomes a warning here."""
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
    """Class, message and attributes of the error are transferred."""
    key = engine.key_of(COMBINE)
    failed = unit_of(COMBINE, key, "failed", 0.0, error=error)
    replace_worker(monkeypatch, f"print({unit_to_json(failed)!r})")

    received = prewarm(COMBINE)[COMBINE].error

    assert type(received) is type(error)
    assert (str(received), vars(received)) == (str(error), vars(error))


def test_a_real_worker_reports_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that forbids compilation is one example."""
    monkeypatch.setenv("MLAGEN_JIT", "off")

    unit = prewarm(COMBINE)[COMBINE]

    assert unit.status == "failed"
    assert isinstance(unit.error, mlagen.MissError)
    assert "MLAGEN_JIT=off forbids to compile" in str(unit.error)


def test_an_unwritable_cache_is_an_error_even_with_load(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes exchange kernels on the disk only."""
    cache_dir.write_text("a file where the folder should be")
    monkeypatch.setattr("mlagen.prewarming.run.devices_for", lambda _specs: {0: SM_80})

    with pytest.raises(mlagen.CacheError, match=r"^cache: expected a writable folder, got "):
        prewarm(COMBINE, load=True)


def test_a_warning_of_a_worker_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning is logged in this process."""
    unit = build_in_process(OTHER)
    code = f"import sys; print({unit_to_json(unit)!r}); print('cache: moved', file=sys.stderr)"
    replace_worker(monkeypatch, code)

    prewarm(COMBINE)

    assert caplog.messages == ["cache: moved"]


def test_a_process_that_cannot_be_started_fails_its_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine may have reached its process limit."""

    def reject(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", reject)

    unit = prewarm(COMBINE)[COMBINE]

    assert unit.status == "failed"
    assert str(unit.error) == f"worker: expected a process, got {os.strerror(errno.EAGAIN)}"
