"""Isolated builds: each kernel compiles in its own process, so a crash or hang affects no other."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlagen import errors
from mlagen.cache.default_store import kernel_store
from mlagen.cache.key import CacheKey
from mlagen.cache.layout import Layout
from mlagen.cache.quarantine import discard_staged
from mlagen.engine import key_of
from mlagen.errors import CompileError, MlagenError
from mlagen.prewarming.report import PrewarmUnit, ms_since, unit_of
from mlagen.settings import current_settings, unread_variables
from mlagen.spec.kernel import KernelSpec

# Sets sys.path to that of this process first, without the current folder.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from mlagen.prewarming.worker import main; main(sys.argv[1])"
)

_logger = logging.getLogger("mlagen")


@contextmanager
def worker_pool(timeout_s: float) -> Iterator[WorkerPool]:
    """Open a pool of processes that build kernels; leaving the context kills running ones.

    ``timeout_s`` limits each process, from its start to the published entry.
    """
    # Never written: workers see end-of-file when this process ends for any reason.
    lifeline, write_end = os.pipe()
    pool = WorkerPool(timeout_s, lifeline)
    try:
        yield pool
    finally:
        pool.stop()
        os.close(write_end)
        os.close(lifeline)


class WorkerPool:
    """Builds each kernel in its own process, which is killed after the timeout.

    The processes are in their own sessions, so that Ctrl-C reaches only this process.
    """

    def __init__(self, timeout_s: float, lifeline: int) -> None:
        self._timeout_s = timeout_s
        self._lifeline = lifeline
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_stopped = False

    def build(self, spec: KernelSpec) -> PrewarmUnit:
        """Compile a kernel, unless it is cached; thread-safe."""
        start, key = time.perf_counter(), key_of(spec)
        try:
            process = self._start(spec)
        except OSError as error:
            return unit_of(spec, key, "failed", start, error=_start_error(error))
        if process is None:
            return unit_of(spec, key, "skipped", start)
        try:
            out, err = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            message = f"timeout: expected a compiled kernel in {self._timeout_s:g} s, got none"
            timeout = CompileError(message, log="", source="")
            return unit_of(spec, key, "timeout", start, error=timeout)
        finally:
            with self._lock:
                self._running.discard(process)
            if process.returncode:
                _clear_staging(key, process.pid)
        # A worker that is stopped between publishing and answering has published its kernel.
        if self._is_stopped and (entry := kernel_store().look_up(key, is_dry=True).entry):
            return unit_of(spec, key, "built", start, entry=entry)
        if process.returncode or not out:
            return unit_of(spec, key, "failed", start, error=_exit_error(process.returncode, err))
        for line in err.splitlines():
            _logger.warning("%s", line)
        return _unit_from_json(json.loads(out), spec, key, start)

    def stop(self) -> None:
        """Kill the running processes, and start no others."""
        with self._lock:
            self._is_stopped = True
            for process in self._running:
                process.kill()

    def _start(self, spec: KernelSpec) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._is_stopped:
                return None
            process = subprocess.Popen(
                worker_command(spec),
                env=_environment(),
                stdin=self._lifeline,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._running.add(process)
            return process


def worker_command(spec: KernelSpec) -> list[str]:
    """Return the command that builds ``spec`` in its own process."""
    return [sys.executable, "-c", _BOOT, str(spec), *sys.path]


def _environment() -> dict[str, str]:
    # Every line on the stderr of a worker becomes a warning here, so it must log warnings only, and
    # not repeat those of this process.
    left_out = {"MLAGEN_LOG", *unread_variables(os.environ)}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def unit_to_json(unit: PrewarmUnit) -> str:
    """Return the answer of a worker as JSON."""
    document: dict[str, Any] = {
        "toolchain": unit.toolchain,
        "status": unit.status,
        "registers": unit.registers,
        "spill_bytes": unit.spill_bytes,
        "cubin_bytes": unit.cubin_bytes,
    }
    if unit.error is not None:
        attributes = {name: str(value) for name, value in vars(unit.error).items()}
        document["error"] = {
            "kind": type(unit.error).__name__,
            "message": str(unit.error),
            **attributes,
        }
    return json.dumps(document)


def _unit_from_json(
    document: dict[str, Any], spec: KernelSpec, key: CacheKey, start: float
) -> PrewarmUnit:
    error_fields = document.pop("error", None)
    error = None if error_fields is None else _error_from_json(**error_fields)
    return PrewarmUnit(spec=spec, key=key.digest, ms=ms_since(start), error=error, **document)


def _error_from_json(*, kind: str, message: str, **attributes: Any) -> MlagenError:
    if "path" in attributes:
        attributes["path"] = Path(attributes["path"])
    cls: type[MlagenError] = getattr(errors, kind)
    return cls(message, **attributes)


def _start_error(error: OSError) -> CompileError:
    """Return the error for a worker that could not be started."""
    message = f"worker: expected a process, got {error.strerror or error}"
    return CompileError(message, log="", source="")


def _exit_error(status: int, err: str) -> CompileError:
    """Return the error for a worker that ended without an answer."""
    if status < 0:
        got = signal.Signals(-status).name
    else:
        lines = err.strip().splitlines() or ["nothing"]
        got = f"exit status {status}: {lines[-1]}"
    return CompileError(f"worker: expected a compiled kernel, got {got}", log=err, source="")


def _clear_staging(key: CacheKey, pid: int) -> None:
    """Remove the staging folder of a dead worker; a sweep would wait for an hour."""
    settings = current_settings()
    layout = Layout(settings.cache_dir, settings.trusts_shared)
    discard_staged(layout, f"{key.digest}.{os.uname().nodename}.{pid}.")
