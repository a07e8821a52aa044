"""Isolated builds: the result of a worker, and workers that crash, hang or are interrupted."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mlagen
from mlagen import engine
from mlagen.cache.layout import Layout
from mlagen.prewarming import PrewarmEvent, isolation
from mlagen.prewarming.build import build_in_process
from mlagen.prewarming.isolation import unit_to_json, worker_command, worker_pool
from mlagen.prewarming.report import PrewarmUnit, unit_of
from mlagen.settings import current_settings
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec
from tests.cache.builds import wait_for
from tests.fixture_types import Log, Patch
from tests.kernels import COMBINE, SM_80

OTHER = CombineSpec(arch=SM_80, dtype=DType.FP16, head_dim_vo=512)


def replace_worker(monkeypatch: Patch, code: str) -> None:
    """Replace the worker of COMBINE by this code."""

    def command(spec: KernelSpec) -> list[str]:
        own = [sys.executable, "-c", code, str(spec), *sys.path]
        return own if spec == COMBINE else worker_command(spec)

    monkeypatch.setattr(isolation, "worker_command", command)


def prewarm(*specs: KernelSpec, **options: Any) -> dict[KernelSpec, PrewarmUnit]:
    """Return the units of an isolated prewarm, of COMBINE without specs."""
    report = mlagen.prewarm(kernels=specs or [COMBINE], isolate=True, **options)
    return {unit.spec: unit for unit in report.units}


def test_a_kernel_is_built_in_its_process_and_found_here(monkeypatch: Patch, caplog: Log) -> None:
    """Unit and entry equal those built here; a worker's MLAGEN_LOG adds no warnings."""
    monkeypatch.setenv("MLAGEN_LOG", "debug")

    unit = prewarm()[COMBINE]

    outcome, here = engine.find_or_build(COMBINE), build_in_process(COMBINE)
    manifest = outcome.entry.manifest
    assert (unit.status, outcome.built, manifest.created_by) == ("built", False, "prewarm")
    assert manifest.created["pid"] != os.getpid()
    facts = [(u.key, u.toolchain, u.registers, u.spill_bytes, u.cubin_bytes) for u in (unit, here)]
    assert facts[0] == facts[1]
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    replace_worker(monkeypatch, "raise SystemExit(1)")  # a cached kernel starts none
    assert prewarm()[COMBINE].status == "hit"


@pytest.mark.parametrize("timeout_s", [2_147_484, 1e10, 1e300])
def test_a_timeout_may_be_longer_than_the_system_waits(timeout_s: float) -> None:
    """Limits of more than 24 days, which poll does not count in milliseconds, build the kernel."""
    assert prewarm(timeout_s=timeout_s)[COMBINE].status == "built"


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
def test_an_error_and_a_warning_of_a_worker_are_the_same_here(
    error: mlagen.MlagenError, monkeypatch: Patch, caplog: Log
) -> None:
    """Class, message and attributes of the error are transferred, and stderr is a warning."""
    failed = unit_to_json(unit_of(COMBINE, engine.key_of(COMBINE), "failed", 0.0, error=error))
    replace_worker(monkeypatch, f"import sys; print({failed!r}); sys.stderr.write('moved\\n')")
    received = prewarm()[COMBINE].error
    assert type(received) is type(error)
    assert (str(received), vars(received)) == (str(error), vars(error))
    assert caplog.messages == ["moved"]


def test_an_unwritable_cache_is_an_error_with_load(cache_dir: Path, monkeypatch: Patch) -> None:
    """Processes exchange kernels on the disk only."""
    cache_dir.write_text("a file where the folder should be")
    monkeypatch.setattr("mlagen.prewarming.run.devices_for", lambda _specs: {0: SM_80})
    with pytest.raises(mlagen.CacheError, match=r"^cache: expected a writable folder, got "):
        prewarm(load=True)


def test_a_process_that_fails_or_cannot_be_started_fails_its_kernel(monkeypatch: Patch) -> None:
    """A real worker reports its error; a machine may have reached its process limit."""
    monkeypatch.setenv("MLAGEN_JIT", "off")
    unit = prewarm()[COMBINE]
    assert (unit.status, type(unit.error)) == ("failed", mlagen.MissError)
    assert "MLAGEN_JIT=off forbids to compile" in str(unit.error)

    def reject(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", reject)
    unit = prewarm()[COMBINE]
    message = f"worker: expected a process, got {os.strerror(errno.EAGAIN)}"
    assert (unit.status, str(unit.error)) == ("failed", message)


NO_CORE = "import os, resource, signal; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
TALKS = "import sys; sys.stderr.write('one\\ntwo\\n');"
# A real worker whose compiler does this.
WORKER = (
    "import sys; sys.path[:] = sys.argv[2:]; import ctypes, pathlib, time; "
    f"{NO_CORE}from mlagen import engine; engine.build_spec = lambda *_: {{}}; "
    "from mlagen.prewarming.worker import main; main(sys.argv[1])"
)


@pytest.mark.parametrize(
    ("code", "got", "log"),
    [
        (f"{NO_CORE}os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", ""),
        (f"{NO_CORE}os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", ""),
        (WORKER.format("ctypes.string_at(0)"), "SIGSEGV", ""),
        (f"{TALKS} sys.exit(3)", "exit status 3: two", "one\ntwo\n"),
        ("", "exit status 0: nothing", ""),
        # Ctrl-C of the terminal does not reach a session of its own.
        ("import os, sys; sys.exit(42 * (os.getsid(0) == os.getpid()))", "exit status 42: ", ""),
    ],
    ids=["segfault", "kill -9", "compiler", "exception", "silence", "session"],
)
def test_a_worker_that_dies_fails_its_kernel_alone(
    code: str, got: str, log: str, monkeypatch: Patch
) -> None:
    """The unit has exit reason and output, the others are built, and the kernel is rebuilt then."""
    replace_worker(monkeypatch, code)
    units = prewarm(COMBINE, OTHER)
    error = units[COMBINE].error
    assert (units[COMBINE].status, units[OTHER].status) == ("failed", "built")
    assert isinstance(error, mlagen.CompileError)
    assert str(error).startswith(f"worker: expected a compiled kernel, got {got}")
    assert error.log == log
    assert build_in_process(COMBINE).status == "built"


def test_a_worker_that_takes_too_long_is_killed(monkeypatch: Patch) -> None:
    """Its unit is a timeout, and no process remains."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(popen(*arguments, **options))
        return started[-1]

    popen = subprocess.Popen
    replace_worker(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(subprocess, "Popen", start)
    unit = prewarm(timeout_s=0.5)[COMBINE]
    message = "timeout: expected a compiled kernel in 0.5 s, got none"
    assert (unit.status, str(unit.error)) == ("timeout", message)
    assert unit.ms >= 500
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_a_compiler_that_hangs_leaves_no_lock(tmp_path: Path, monkeypatch: Patch) -> None:
    """A worker killed with the lock of its kernel releases it, and its staging is deleted."""
    ready = tmp_path / "ready"
    hangs = f"(pathlib.Path({str(ready)!r}).touch(), time.sleep(600))"
    replace_worker(monkeypatch, WORKER.format(hangs))

    class Impatient(subprocess.Popen[str]):
        def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002 - as subprocess says
            if timeout is not None:
                wait_for(ready.exists)
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().communicate(input)

    monkeypatch.setattr(subprocess, "Popen", Impatient)

    assert prewarm()[COMBINE].status == "timeout"
    assert build_in_process(COMBINE).status == "built"
    assert list(Layout(current_settings().cache_dir).staging.iterdir()) == []


def test_an_interrupted_prewarm_kills_its_workers(tmp_path: Path, monkeypatch: Patch) -> None:
    """Their staging folders are deleted; the exception reaches the caller."""
    staging = Layout(current_settings().cache_dir).new_staging(engine.key_of(COMBINE).digest)
    ready = tmp_path / "ready"
    folder = str(staging).replace(f".{os.getpid()}.", ".%d.")
    code = (
        f"import os, time; path = {folder!r} % os.getpid(); os.mkdir(path); "
        f"open({str(ready)!r}, 'w').write(path); time.sleep(600)"
    )
    replace_worker(monkeypatch, code)

    def interrupt(event: PrewarmEvent) -> None:
        if event.kind == "started":
            wait_for(lambda: ready.exists() and ready.read_text())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prewarm(on_event=interrupt)

    written = Path(ready.read_text())
    assert not written.exists()
    assert list(staging.parent.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.name.split(".")[-2]), 0)


def test_nothing_is_started_after_the_end() -> None:
    """A kernel that would start too late is skipped."""
    with worker_pool(60.0) as pool:
        pool.stop()
        unit = pool.build(COMBINE)
    assert (unit.status, unit.error) == ("skipped", None)


# A prewarm whose worker is a real one that hangs; argv: the file that gets the worker's pid.
HANGING = f"""
import sys
import mlagen
from mlagen.prewarming import isolation
isolation._BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; import os, time; "
    "from mlagen.prewarming import worker; "
    f"ready = {{sys.argv[1]!r}}; "
    "hang = lambda spec: (open(ready, 'w').write(str(os.getpid())), time.sleep(600)); "
    "worker.build_in_process = hang; worker.main(sys.argv[1])"
)
mlagen.prewarm(kernels={str(COMBINE)!r}, isolate=True)
"""


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """A killed prewarm has no running workers."""

    def has_ended() -> bool:
        try:
            stat = Path(f"/proc/{int(ready.read_text())}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        return stat.rpartition(")")[2].split()[0] in {"Z", "X"}  # a zombie is none

    ready = tmp_path / "ready"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", HANGING, str(ready)], env=environ)
    wait_for(lambda: ready.exists() and ready.read_text())
    parent.kill()
    parent.wait()
    wait_for(has_ended)
