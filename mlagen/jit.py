"""JIT policy of this process, and the reports of its compilations."""

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
# A call that blocks longer looks like a hang.
_SLOW_S = 2.0

_logger = logging.getLogger("mlagen")

_frozen = "on"
_callbacks: dict[object, Callable[[CompileEvent], object]] = {}  # by subscription


@dataclass(frozen=True, kw_only=True)
class CompileEvent:
    """The start or the end of a compilation.

    Attributes
    ----------
    phase : str
        ``started``, ``finished`` or ``failed``.
    kernel : str
        The kernel as text, which ``mlagen prewarm --kernel`` takes.
    reason : str
        Why the cache has no entry: ``absent``, ``other toolchain``, ``damaged`` or ``unreadable``.
    ms : float
        Milliseconds since the start.
    """

    phase: str
    kernel: str
    reason: str
    ms: float


def freeze(mode: str = "error") -> None:
    """Forbid calls to compile from now on, or log a warning for each compilation.

    For the end of a server's warm-up: calls still load cached kernels, and a missing kernel raises
    :class:`mlagen.MissError` with its name. Prewarming may still compile.

    Parameters
    ----------
    mode : str
        ``error``, ``warn``, or ``on`` to lift it. A stricter ``MLAGEN_JIT`` takes precedence.

    Raises
    ------
    ArgumentError
        If ``mode`` is none of them.
    """
    global _frozen  # noqa: PLW0603 - process state
    _frozen = require_choice(mode, "mode", _FREEZING)


def on_compile(callback: Callable[[CompileEvent], object]) -> Callable[[], None]:
    """Call a function at each compilation, in the thread that compiles.

    Exceptions of the function are logged, and do not stop the compilation.

    Parameters
    ----------
    callback : callable
        Receives a :class:`mlagen.jit.CompileEvent` at the start and at the end of a compilation.

    Returns
    -------
    callable
        Ends the subscription.

    Raises
    ------
    ArgumentError
        If ``callback`` is not callable.
    """
    subscription = object()
    _callbacks[subscription] = require_callable(callback, "callback")

    def end() -> None:
        _callbacks.pop(subscription, None)

    return end


def jit_mode() -> str:
    """Return the stricter of ``MLAGEN_JIT`` and the mode of :func:`freeze`."""
    return max(current_settings().jit, _frozen, key=JIT_MODES.index)


def compile_forbidden_by() -> str:
    """Return the setting that forbids compilation, for a message."""
    mode = current_settings().jit
    return f"MLAGEN_JIT={mode}" if mode in {"freeze", "error", "off"} else "mlagen.freeze()"


@contextmanager
def report_compilation(
    kernel: str, reason: str, compiler: str, folder: object, *, is_awaited: bool = True
) -> Iterator[None]:
    """Report a compilation to the log, the callbacks and the metrics.

    If a call waits for it (``is_awaited``) and it is slow, a warning recommends prewarming.
    """
    start = time.perf_counter()
    level = logging.WARNING if jit_mode() == "warn" else logging.INFO
    _logger.log(level, "compiling %s with %s: %s in %s", kernel, compiler, reason, folder)
    _call(CompileEvent(phase="started", kernel=kernel, reason=reason, ms=0.0))
    phase = "failed"
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(kernel, start, ended, is_awaited), daemon=True)
    try:
        with suppress(RuntimeError):  # if no thread starts, there is no progress log
            watch.start()
        yield
        phase = "finished"
    finally:
        ended.set()
        if watch.ident is not None:
            watch.join()  # its last line must precede the final one
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
    for callback in tuple(_callbacks.values()):
        _call_one(callback, event)


def _call_one(callback: Callable[[CompileEvent], object], event: CompileEvent) -> None:
    try:
        callback(event)
    except Exception:
        _logger.exception("on_compile: expected a callback that raises nothing, got")
