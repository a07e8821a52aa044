"""Whether this process may compile, and who is told when it does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from mlagen.monitoring import count
from mlagen.settings import JIT_MODES, current_settings
from mlagen.values import require_callable, require_choice

_FREEZING = ("on", "warn", "error")
_PROGRESS_S = 10.0
# A call that waits longer looks like a hang.
_SLOW_S = 2.0

_logger = logging.getLogger("mlagen")

_frozen = "on"
_callbacks: list[Callable[[CompileEvent], object]] = []


@dataclass(frozen=True, kw_only=True)
class CompileEvent:
    """A kernel is being compiled, or was.

    Attributes
    ----------
    phase : str
        ``started``, ``finished`` or ``failed``.
    kernel : str
        The kernel as text, which ``mlagen prewarm --kernel`` takes.
    reason : str
        Why it was not found: ``absent``, ``other toolchain``, ``damaged`` or ``unreadable``.
    ms : float
        Milliseconds since it started.
    """

    phase: str
    kernel: str
    reason: str
    ms: float


def freeze(mode: str = "error") -> None:
    """Forbid calls to compile from now on, or have each compilation warned of.

    For the end of a server's warm-up: what the cache has is still loaded, what it lacks is a
    :class:`mlagen.MissError` that names the kernel. Prewarming may compile all the same.

    Parameters
    ----------
    mode : str
        ``error``, ``warn``, or ``on`` to lift it. ``MLAGEN_JIT`` may be stricter, and then counts.

    Raises
    ------
    ArgumentError
        If it is none of them.
    """
    global _frozen  # noqa: PLW0603 - it is a state of the process
    _frozen = require_choice(mode, "mode", _FREEZING)


def on_compile(callback: Callable[[CompileEvent], object]) -> Callable[[], None]:
    """Have a function called when a kernel is compiled, in the thread that compiles it.

    Whatever it raises is logged and keeps no kernel from being compiled.

    Parameters
    ----------
    callback : callable
        Gets a :class:`mlagen.jit.CompileEvent` when a compilation starts, and another at its end.

    Returns
    -------
    callable
        Ends the subscription.

    Raises
    ------
    ArgumentError
        If it cannot be called.
    """
    require_callable(callback, "callback")
    _callbacks.append(callback)

    def end() -> None:
        if callback in _callbacks:
            _callbacks.remove(callback)

    return end


def jit_mode() -> str:
    """Return the stricter one of ``MLAGEN_JIT`` and what was frozen."""
    return max(current_settings().jit, _frozen, key=JIT_MODES.index)


def who_forbids() -> str:
    """Return what forbids to compile, for a message."""
    asked = current_settings().jit
    return f"MLAGEN_JIT={asked}" if asked in {"error", "off"} else "mlagen.freeze()"


@contextmanager
def told(
    kernel: str, reason: str, compiler: str, folder: object, *, is_awaited: bool = True
) -> Iterator[None]:
    """Report a compilation to the log, the callbacks and the counters.

    If a call waits for it, ``is_awaited``, and it takes long, a warning says how to avoid that.
    """
    start = time.perf_counter()
    level = logging.WARNING if jit_mode() == "warn" else logging.INFO
    _logger.log(level, "compiling %s with %s: %s in %s", kernel, compiler, reason, folder)
    _call(CompileEvent(phase="started", kernel=kernel, reason=reason, ms=0.0))
    phase = "failed"
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(kernel, start, ended, is_awaited), daemon=True)
    try:
        with suppress(RuntimeError):  # where no thread can be started, nothing is said in between
            watch.start()
        yield
        phase = "finished"
    finally:
        ended.set()
        if watch.ident is not None:
            watch.join()  # or its last line might come after the one that says that it is over
        ms = (time.perf_counter() - start) * 1e3
        count("compiles" if phase == "finished" else "compiles.failed")
        count("compile_ms", ms)
        what = "compiled" if phase == "finished" else "failed to compile"
        _logger.log(level, "%s %s in %.1f s", what, kernel, ms / 1e3)
        _call(CompileEvent(phase=phase, kernel=kernel, reason=reason, ms=ms))


def _watch(kernel: str, start: float, ended: threading.Event, is_awaited: bool) -> None:
    if is_awaited and not ended.wait(_SLOW_S):
        _logger.warning(
            "compiling %s: %.0f s so far; compile ahead of time with: mlagen prewarm --kernel '%s'",
            kernel,
            time.perf_counter() - start,
            kernel,
        )
    while not ended.wait(_PROGRESS_S):
        _logger.info("still compiling %s, %.0f s", kernel, time.perf_counter() - start)


def _call(event: CompileEvent) -> None:
    for callback in tuple(_callbacks):
        _call_one(callback, event)


def _call_one(callback: Callable[[CompileEvent], object], event: CompileEvent) -> None:
    try:
        callback(event)
    except Exception:
        _logger.exception("on_compile: expected a callback that raises nothing, got")
