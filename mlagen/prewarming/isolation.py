"""Kernels built in processes of their own: one that dies or hangs takes no other with it."""

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
from mlagen.settings import current_settings
from mlagen.spec.kernel import KernelSpec

# Before anything is imported, the path is that of this process: the current folder is none of it.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from mlagen.prewarming.worker import main; main(sys.argv[1])"
)

_logger = logging.getLogger("mlagen")


@contextmanager
def workers(timeout_s: float) -> Iterator[Workers]:
    """Give processes that build kernels; leaving the context kills what is still at work.

    ``timeout_s`` is what one may take, from its start to the published entry.
    """
    # Nothing is ever written: when this process ends, however that happens, they see the end.
    lifeline, ours = os.pipe()
    made = Workers(timeout_s, lifeline)
    try:
        yield made
    finally:
        made.stop()
        os.close(ours)
        os.close(lifeline)


class Workers:
    """Builds each kernel in a process of its own, which is killed where it takes too long.

    Its processes are in sessions of their own, so that Ctrl-C reaches this process alone.
    """

    def __init__(self, timeout_s: float, lifeline: int) -> None:
        self._timeout_s = timeout_s
        self._lifeline = lifeline
        self._changing = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_stopped = False

    def build(self, spec: KernelSpec) -> PrewarmUnit:
        """Compile a kernel, unless the cache has it; from any thread."""
        start, key = time.perf_counter(), key_of(spec)
        try:
            process = self._start(spec)
        except OSError as rejected:
            return unit_of(spec, key, "failed", start, error=_rejection(rejected))
        if process is None:
            return unit_of(spec, key, "skipped", start)
        try:
            out, err = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            message = f"timeout: expected a compiled kernel in {self._timeout_s:g} s, got none"
            error = CompileError(message, log="", source="")
            return unit_of(spec, key, "timeout", start, error=error)
        finally:
            with self._changing:
                self._running.discard(process)
            if process.returncode:
                _clear_staging(key, process.pid)
        # A worker that is stopped between publishing and answering has kept its kernel.
        if self._is_stopped and (entry := kernel_store().look_up(key, is_dry=True).entry):
            return unit_of(spec, key, "built", start, entry=entry)
        if process.returncode or not out:
            return unit_of(spec, key, "failed", start, error=_death(process.returncode, err))
        for line in err.splitlines():
            _logger.warning("%s", line)
        return _unit_from(json.loads(out), spec, key, start)

    def stop(self) -> None:
        """Kill the processes that are at work, and start no others."""
        with self._changing:
            self._is_stopped = True
            for process in self._running:
                process.kill()

    def _start(self, spec: KernelSpec) -> subprocess.Popen[str] | None:
        with self._changing:
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
    """Return the command that builds ``spec`` in a process of its own."""
    return [sys.executable, "-c", _BOOT, str(spec), *sys.path]


def _environment() -> dict[str, str]:
    # What a worker logs is logged here as a warning: it must log nothing else.
    return {name: value for name, value in os.environ.items() if name != "MLAGEN_LOG"}


def unit_text(unit: PrewarmUnit) -> str:
    """Return what a worker says of its kernel."""
    document: dict[str, Any] = {
        "toolchain": unit.toolchain,
        "status": unit.status,
        "registers": unit.registers,
        "spill_bytes": unit.spill_bytes,
        "cubin_bytes": unit.cubin_bytes,
    }
    if unit.error is not None:
        facts = {name: str(value) for name, value in vars(unit.error).items()}
        document["error"] = {"kind": type(unit.error).__name__, "message": str(unit.error), **facts}
    return json.dumps(document)


def _unit_from(
    document: dict[str, Any], spec: KernelSpec, key: CacheKey, start: float
) -> PrewarmUnit:
    told = document.pop("error", None)
    error = None if told is None else _error_from(**told)
    return PrewarmUnit(spec=spec, key=key.digest, ms=ms_since(start), error=error, **document)


def _error_from(*, kind: str, message: str, **facts: Any) -> MlagenError:
    if "path" in facts:
        facts["path"] = Path(facts["path"])
    cls: type[MlagenError] = getattr(errors, kind)
    return cls(message, **facts)


def _rejection(error: OSError) -> CompileError:
    """Return the error of a worker that the system did not start."""
    message = f"worker: expected a process, got {error.strerror or error}"
    return CompileError(message, log="", source="")


def _death(status: int, err: str) -> CompileError:
    """Return the error of a worker that ended without a word."""
    if status < 0:
        got = signal.Signals(-status).name
    else:
        said = err.strip().splitlines() or ["nothing"]
        got = f"exit status {status}: {said[-1]}"
    return CompileError(f"worker: expected a compiled kernel, got {got}", log=err, source="")


def _clear_staging(key: CacheKey, pid: int) -> None:
    """Remove what a dead worker was writing; nobody else would for an hour."""
    settings = current_settings()
    layout = Layout(settings.cache_dir, settings.trusts_shared)
    discard_staged(layout, f"{key.digest}.{os.uname().nodename}.{pid}.")
