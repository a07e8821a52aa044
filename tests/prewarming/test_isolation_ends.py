"""Isolated builds: workers that crash, hang or are interrupted."""

from __future__ import annotations

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
from mlagen.prewarming import PrewarmEvent
from mlagen.prewarming.build import build_in_process
from mlagen.prewarming.isolation import worker_pool
from mlagen.settings import current_settings
from tests.cache.builds import wait_for
from tests.kernels import COMBINE
from tests.prewarming.isolated import FOREVER, OTHER, prewarm, replace_worker

# A real worker whose compiler does this.
WORKER = (
    "import sys; sys.path[:] = sys.argv[2:]; import ctypes, pathlib, resource, time; "
    "from mlagen import engine; engine.build_spec = lambda *_: {}; "
    "from mlagen.prewarming.worker import main; main(sys.argv[1])"
)


DIES = "import os, resource, signal; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill"
GOT = "worker: expected a compiled kernel, got"


@pytest.mark.parametrize(
    ("code", "message", "log"),
    [
        (f"{DIES}(os.getpid(), signal.SIGSEGV)", f"{GOT} SIGSEGV", ""),
        (f"{DIES}(os.getpid(), signal.SIGKILL)", f"{GOT} SIGKILL", ""),
        (
            "import sys; sys.stderr.write('one\\ntwo\\n'); sys.exit(3)",
            f"{GOT} exit status 3: two",
            "one\ntwo\n",
        ),
        ("", f"{GOT} exit status 0: nothing", ""),
    ],
    ids=["segfault", "kill -9", "exception", "silence"],
)
def test_a_worker_that_dies_fails_its_kernel_alone(
    code: str, message: str, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unit has the exit reason and the output; the other kernels are built."""
    replace_worker(monkeypatch, code)

    units = prewarm(COMBINE, OTHER)

    error = units[COMBINE].error
    assert (units[COMBINE].status, units[OTHER].status) == ("failed", "built")
    assert isinstance(error, mlagen.CompileError)
    assert (str(error), error.log) == (message, log)


def test_a_worker_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its unit is a timeout, and no process remains."""
    replace_worker(monkeypatch, FOREVER)
    started: list[subprocess.Popen[str]] = []

    class Seen(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            started.append(self)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", Seen)

    unit = prewarm(COMBINE, timeout_s=0.5)[COMBINE]

    assert unit.status == "timeout"
    assert str(unit.error) == "timeout: expected a compiled kernel in 0.5 s, got none"
    assert unit.ms >= 500
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_an_interrupted_prewarm_kills_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their staging folders are deleted; the exception reaches the caller."""
    staging = Layout(current_settings().cache_dir).new_staging(engine.key_of(COMBINE).digest)
    ready = tmp_path / "ready"
    folder = str(staging).replace(f".{os.getpid()}.", ".%d.")
    code = (
        f"import os; path = {folder!r} % os.getpid(); os.mkdir(path); "
        f"open({str(ready)!r}, 'w').write(path); {FOREVER}"
    )
    replace_worker(monkeypatch, code)

    def interrupt(event: PrewarmEvent) -> None:
        if event.kind == "started":
            wait_for(lambda: ready.exists() and ready.read_text())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prewarm(COMBINE, on_event=interrupt)

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
    ready = tmp_path / "ready"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", HANGING, str(ready)], env=environ)
    wait_for(lambda: ready.exists() and ready.read_text())

    parent.kill()
    parent.wait()

    wait_for(lambda: has_ended(int(ready.read_text())))


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in {"Z", "X"}


def test_ctrl_c_of_the_terminal_does_not_reach_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has its own session, and its parent decides."""
    replace_worker(
        monkeypatch, "import os, sys; sys.exit(42 if os.getsid(0) == os.getpid() else 1)"
    )

    assert "exit status 42" in str(prewarm(COMBINE)[COMBINE].error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 1.0}, "timeout_s: expected isolate beside it, got 1.0 alone"),
        (
            {"timeout_s": 0.0, "isolate": True},
            "timeout_s: expected more than 0 seconds, got 0.0",
        ),
        (
            {"timeout_s": float("nan"), "isolate": True},
            "timeout_s: expected more than 0 seconds, got nan",
        ),
    ],
)
def test_a_timeout_needs_isolation_and_must_be_positive(
    options: dict[str, Any], message: str
) -> None:
    """A compiling thread cannot be killed, so a timeout needs isolation."""
    with pytest.raises(mlagen.ArgumentError) as caught:
        mlagen.prewarm(kernels=[COMBINE], **options)

    assert str(caught.value) == message


def test_a_compiler_that_crashes_fails_its_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It crashes during a compilation, with the lock of the kernel; then the kernel is rebuilt."""
    limit = "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"  # no core dump
    replace_worker(monkeypatch, WORKER.format(f"({limit}, ctypes.string_at(0))"))

    units = prewarm(COMBINE, OTHER)

    assert str(units[COMBINE].error) == "worker: expected a compiled kernel, got SIGSEGV"
    assert units[OTHER].status == "built"
    assert build_in_process(COMBINE).status == "built"


def test_a_compiler_that_hangs_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker killed with the lock of its kernel releases it, and its staging is deleted."""
    ready = tmp_path / "ready"
    replace_worker(
        monkeypatch, WORKER.format(f"(pathlib.Path({str(ready)!r}).touch(), time.sleep(600))")
    )

    class Impatient(subprocess.Popen[str]):
        def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002 - as subprocess says
            if timeout is not None:
                wait_for(ready.exists)
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().communicate(input)

    monkeypatch.setattr(subprocess, "Popen", Impatient)

    status = prewarm(COMBINE)[COMBINE].status

    assert status == "timeout"
    assert build_in_process(COMBINE).status == "built"
    assert list(Layout(current_settings().cache_dir).staging.iterdir()) == []
