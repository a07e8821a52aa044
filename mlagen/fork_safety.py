"""What neither a fork nor the end of the process must cut in two.

A forked child has one thread. A lock that another thread of its parent held stays locked in the
child for ever, and there are locks that nobody sees: a module that is being imported has one. A
process that ends stops its daemon threads wherever they are.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# A fork goes on then: better a child that may hang than a parent that does.
_FORK_WAITS_S = 10.0

# A process ends then; what it waits for takes a few seconds.
_EXIT_WAITS_S = 30.0

_whole = threading.RLock()
_forking = threading.local()
_unfinished: set[object] = set()
_is_ending = False


@contextmanager
def in_one_piece() -> Iterator[None]:
    """Let forks by other threads wait until this is done; for imports and other short work."""
    with _whole:
        yield


@contextmanager
def finished_before_exit() -> Iterator[None]:
    """Let the process end only when this is done, in a daemon thread too, if it has begun."""
    mine = object()
    if not _is_ending:
        _unfinished.add(mine)
    try:
        yield
    finally:
        _unfinished.discard(mine)


def is_ending() -> bool:
    """Whether this process ends as soon as what has begun is done."""
    return _is_ending


def _before_exit() -> None:
    global _is_ending  # noqa: PLW0603 - it is a state of the process
    _is_ending = True
    deadline = time.monotonic() + _EXIT_WAITS_S
    while _unfinished and time.monotonic() < deadline:
        time.sleep(0.01)


def _before_fork() -> None:
    _forking.held = _whole.acquire(timeout=_FORK_WAITS_S)


def _after_fork_in_parent() -> None:
    if _forking.held:
        _whole.release()


def _after_fork_in_child() -> None:
    global _whole  # noqa: PLW0603 - whoever holds the old one is not in this process
    if _forking.held:
        _whole.release()
    else:
        _whole = threading.RLock()
    _unfinished.clear()


atexit.register(_before_exit)
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
