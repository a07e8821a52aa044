"""Compilation in this process, or in one of its own where it could hang, crash or be another's.

NVRTC holds locks that a fork does not reset: of six children forked while another thread compiled,
one hung in its first compilation. Process exit also destroys state of NVRTC: of 18 processes that
ended while a daemon thread compiled, five crashed (NVRTC 13.5 on 2 cores).
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import subprocess  # eager, as all of them: a forked child must not import
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlagen.artifacts import Cubin, Resources, Source
from mlagen.compiler.toolchain import Nvrtc
from mlagen.errors import CompileError, ToolchainError
from mlagen.fork_safety import defer_forks, is_exiting
from mlagen.spec.arch import Arch

DEFAULT_TIME_LIMIT_S = 600.0
_START_S = 60.0  # until an interpreter runs; an executable that is none may run for ever
_LOOK_S = 1.0  # between looks at a silent process
_MAX_MESSAGES = 1 << 16  # bytes of stderr that are kept

_HELLO = b"+"

# Says first that it is a Python, and imports nothing from the current folder.
_BOOT = (
    f"import os, sys; os.write(int(sys.argv[1]), {_HELLO!r}); sys.path[:] = sys.argv[2:]; "
    "from mlagen.compiler.process import main; main(int(sys.argv[1]))"
)
_PR_SET_PDEATHSIG = 1

_logger = logging.getLogger("mlagen")

_active_compiles: set[object] = set()  # running compilations of this process
_forked_mid_compile = False  # forked during a compilation, also by an ancestor


class CompileTimeoutError(CompileError):
    """A compilation took longer than its time limit."""


class StartError(ToolchainError):
    """No process can be started to compile in."""


def compile_anywhere(source: Source, arch: Arch, nvrtc: Nvrtc) -> Cubin:
    """Compile ``source`` for ``arch``, in this process if that is safe and it has this NVRTC.

    Raises ToolchainError if NVRTC cannot be loaded or does not know ``arch``, or a process of its
    own is necessary and cannot be started; CompileError if NVRTC rejects the source.
    """
    problem: ToolchainError | None = None
    if not (_forked_mid_compile or is_exiting()):
        with defer_forks():
            from mlagen.compiler.nvrtc import OtherLibraryError, compile_source
        mine = object()
        _active_compiles.add(mine)
        try:
            return compile_source(source, arch, nvrtc)
        except OtherLibraryError as error:
            problem = error
        finally:
            _active_compiles.discard(mine)
    try:
        return CompileProcesses().compile(source, arch, nvrtc)
    except StartError as error:
        raise problem or error from error


class CompileProcesses:
    """Compiles each source in a process of its own, which is killed after the time limit.

    The processes are in their own sessions, so that Ctrl-C reaches only this process, and end with
    the thread that waits for them. All methods are thread-safe.
    """

    def __init__(self, time_limit_s: float = DEFAULT_TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_stopped = False

    def stop(self) -> None:
        """Kill the running processes, and start no others."""
        with self._lock:
            self._is_stopped = True
            for process in self._running:
                process.kill()

    def compile(self, source: Source, arch: Arch, nvrtc: Nvrtc) -> Cubin:
        """Compile ``source`` for ``arch``.

        Raises ToolchainError if NVRTC cannot be loaded or does not know ``arch``, or no process can
        be started; CompileError if NVRTC rejects the source, crashes, or takes too long.
        """
        request = {
            "parent": os.getpid(),
            "source": asdict(source),
            "arch": asdict(arch),
            "nvrtc": {**asdict(nvrtc), "path": str(nvrtc.path)},
        }
        answer, answer_end = os.pipe()
        try:
            try:
                process = self._start(json.dumps(request).encode(), answer_end)
            finally:
                os.close(answer_end)
            try:
                received, messages = _received(process, answer, self._time_limit_s)
                return _cubin_of(received, messages, process, source)
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                with self._lock:
                    self._running.discard(process)
        finally:
            os.close(answer)

    def _start(self, request: bytes, answer_end: int) -> subprocess.Popen[bytes]:
        if not sys.executable or getattr(sys, "frozen", False):
            got = "a frozen program" if sys.executable else "none"
            raise StartError(f"NVRTC: expected a Python to compile in, got {got}")
        command = [sys.executable, "-c", _BOOT, str(answer_end), *map(str, sys.path)]
        with os.fdopen(os.memfd_create("mlagen"), "w+b") as file, self._lock:
            file.write(request)
            file.seek(0)  # also writes the buffer
            if self._is_stopped:
                raise StartError("NVRTC: expected to compile, got an interrupt")
            try:
                process = subprocess.Popen(
                    command,
                    stdin=file,
                    stdout=subprocess.DEVNULL,  # what other code prints
                    stderr=subprocess.PIPE,
                    pass_fds=(answer_end,),
                    start_new_session=True,
                )
            except OSError as error:
                why = error.strerror or error
                raise StartError(f"NVRTC: expected a process to compile in, got {why}") from error
            self._running.add(process)
            return process


def _received(
    process: subprocess.Popen[bytes], answer: int, time_limit_s: float
) -> tuple[bytes, str]:
    """Return the answer of a process and the end of its stderr.

    Raises StartError if it does not say that it is a Python, or says anything else first;
    CompileTimeoutError if it does not answer within the time limit.
    """
    assert process.stderr is not None
    with process.stderr as stderr:
        received = {answer: bytearray(), stderr.fileno(): bytearray()}
        poll, start = select.poll(), time.monotonic()
        for end in received:
            poll.register(end, select.POLLIN)
        is_open = True
        while True:
            limit_s = time_limit_s if received[answer] else min(time_limit_s, _START_S)
            remaining_s = start + limit_s - time.monotonic()
            wait_s = max(0.0, min(remaining_s, _LOOK_S)) if is_open else 0.0
            ready = poll.poll(wait_s * 1e3)
            if remaining_s <= 0 or not (ready or is_open):
                break
            # A child that this process forked meanwhile may keep the pipes open.
            is_open = is_open and (bool(ready) or _ended(process) is None)
            for end, _ in ready:
                data = os.read(end, 1 << 16)
                received[end] += data
                if not data:
                    poll.unregister(end)
                    is_open = is_open and end != answer
            del received[stderr.fileno()][:-_MAX_MESSAGES]
            if received[answer] and not received[answer].startswith(_HELLO):
                raise StartError(
                    "NVRTC: expected a Python to compile in, got other output, from "
                    f"{sys.executable}"
                )
        messages = received[stderr.fileno()].decode(errors="replace")
    if is_open and limit_s == time_limit_s:
        message = f"timeout: expected a compiled kernel in {time_limit_s:g} s, got none"
        raise CompileTimeoutError(message, log=messages, source="")
    if not received[answer]:
        got = f"nothing in {limit_s:g} s" if is_open else _end_of(process, messages)
        raise StartError(
            f"NVRTC: expected a Python to compile in, got {got}, from {sys.executable}"
        )
    return bytes(received[answer][1:]), messages


def _ended(process: subprocess.Popen[bytes]) -> tuple[int, int] | None:
    """Return how a process ended, by code and status; its id stays its own until it is reaped."""
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # reaped by the program, which may ignore SIGCHLD
        return os.CLD_EXITED, 0
    return None if found is None else (found.si_code, found.si_status)


def _end_of(process: subprocess.Popen[bytes], messages: str) -> str:
    """Return how a process ended that closed its answer, in words."""
    deadline = time.monotonic() + _LOOK_S
    while (ended := _ended(process)) is None:
        if time.monotonic() > deadline:
            return "no end"
        time.sleep(0.01)
    code, status = ended
    if code != os.CLD_EXITED:
        return signal.Signals(status).name
    return f"exit status {status}: {(messages.strip().splitlines() or ['nothing'])[-1]}"


def main(answer_end: int) -> None:
    """Run the process: read a request from stdin, write the answer."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.load(sys.stdin.buffer)
    if os.getppid() != request["parent"]:
        os._exit(1)
    from mlagen.compiler.nvrtc import compile_source

    source = Source(**{**request["source"], "origins": tuple(request["source"]["origins"])})
    nvrtc = Nvrtc(**{**request["nvrtc"], "path": Path(request["nvrtc"]["path"])})
    head: dict[str, Any]
    code = b""
    try:
        cubin = compile_source(source, Arch(**request["arch"]), nvrtc)
    except CompileError as error:
        head = {"rejected": str(error), "log": error.log}
    except ToolchainError as error:
        head = {"failed": str(error)}
    else:
        head, code = asdict(cubin), cubin.code
        head["code"] = len(code)
    with os.fdopen(answer_end, "wb") as answer:
        answer.write(json.dumps(head).encode() + b"\n" + code)


def _cubin_of(
    received: bytes, messages: str, process: subprocess.Popen[bytes], source: Source
) -> Cubin:
    """Return the cubin of an answer, or raise its error; other messages become warnings."""
    line, end, code = received.partition(b"\n")
    head: dict[str, Any] = {}
    with suppress(ValueError):
        head = json.loads(line) if end else {}
    if not head or len(code) != head.get("code", 0):
        message = f"NVRTC: expected a compiled kernel, got {_end_of(process, messages)}"
        raise CompileError(message, log=messages, source="")
    for message in messages.splitlines():
        _logger.warning("%s", message)
    if "rejected" in head:
        raise CompileError(head["rejected"], log=head["log"], source=source.text)
    if "failed" in head:
        raise ToolchainError(head["failed"])
    resources = tuple(Resources(**one) for one in head.pop("resources"))
    return Cubin(**{**head, "code": code, "resources": resources})


def _after_fork() -> None:
    global _forked_mid_compile  # noqa: PLW0603 - process-wide state
    _forked_mid_compile = _forked_mid_compile or bool(_active_compiles)
    _active_compiles.clear()


os.register_at_fork(after_in_child=_after_fork)
