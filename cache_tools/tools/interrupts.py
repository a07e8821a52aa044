"""Ctrl-C handling of a command: one exception, then a cleanup that no signal interrupts.

A second ``KeyboardInterrupt`` would hit the cleanup of the first, and print a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from types import FrameType

_INTERRUPTED = 130
_AGAIN_AFTER_S = 0.01

_is_raised = False


class Interrupted(KeyboardInterrupt):
    """An interrupt with a summary of the finished work."""


def install_handlers() -> None:
    """Make Ctrl-C end this process with one line and exit code 130, until work begins.

    Does nothing where Ctrl-C is ignored, as in the background of a shell, or a caller handles it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_once)
        signal.signal(signal.SIGALRM, _raise_again)
        sys.unraisablehook = _repeat_swallowed


@contextmanager
def interruptible() -> Iterator[None]:
    """Make Ctrl-C raise ``KeyboardInterrupt`` once; after the work, ignore it."""
    if signal.getsignal(signal.SIGINT) is not _exit_at_once:
        yield
        return
    signal.signal(signal.SIGINT, _raise_once)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def summarized(summary: Callable[[], str]) -> Iterator[None]:
    """Add to an interrupt of this work what ``summary`` returns: what is kept of it."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(summary()) from None


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Handle SIGTERM as Ctrl-C: shut down in order, and keep the finished work."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise_once)
    try:
        yield
    finally:
        if not _is_raised:
            signal.signal(signal.SIGTERM, before)


def _exit_at_once(_number: int, _frame: object) -> None:
    os.write(2, b"mlagen: interrupted\n")
    os._exit(_INTERRUPTED)  # nothing has begun


def _raise_once(_number: int, _frame: object) -> None:
    global _is_raised  # noqa: PLW0603 - one flag per process
    if not _is_raised:
        _is_raised = True
        raise KeyboardInterrupt


def _repeat_swallowed(unraisable: UnraisableHookArgs) -> None:
    """Raise the interrupt again where Python dropped it, in a finalizer or a callback."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_AFTER_S)
    else:
        sys.__unraisablehook__(unraisable)


def _raise_again(_number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if (
            frame.f_code is _repeat_swallowed.__code__
        ):  # an exception raised inside the hook is dropped, too
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_AFTER_S)
            return
        frame = frame.f_back
    raise KeyboardInterrupt
