"""Critical sections that neither a fork nor process exit may interrupt.

A forked child has one thread. A lock that another thread of its parent holds stays locked in the
child for ever, including hidden locks, such as that of a module during import. Process exit stops
daemon threads at any point.

No package that registers at-fork handlers with locks of its own is imported inside a section: its
handler would run before the one below, and each would wait for the other. What another thread was
importing outside of sections, a child imports again or rejects, but never waits for.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its handlers wait too, so they come first
import logging  # noqa: F401 - the same
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import _bootstrap

# A fork proceeds after this: a child that may hang is better than a parent that hangs.
_MAX_FORK_WAIT_S = 10.0

# The process exits after this; the work that it waits for takes a few seconds.
_MAX_EXIT_WAIT_S = 30.0

# What a child imports again. Other packages may have libraries that cannot be initialized twice.
_REIMPORTED = sys.stdlib_module_names | {"filelock", "jinja2", "markupsafe", "mlagen"}

_fork_lock = threading.RLock()
_forking = threading.local()
_unfinished: set[object] = set()
_is_exiting = False


@contextmanager
def defer_forks() -> Iterator[None]:
    """Delay forks by other threads until the block ends; for imports and other short work."""
    with _fork_lock:
        yield


@contextmanager
def defer_exit() -> Iterator[None]:
    """Delay process exit until the block ends, in a daemon thread too."""
    token = object()
    if not _is_exiting:
        _unfinished.add(token)
    try:
        yield
    finally:
        _unfinished.discard(token)


def is_exiting() -> bool:
    """Whether the process exits as soon as the deferred work is done."""
    return _is_exiting


def _before_exit() -> None:
    global _is_exiting  # noqa: PLW0603 - process state
    _is_exiting = True
    deadline = time.monotonic() + _MAX_EXIT_WAIT_S
    while _unfinished and time.monotonic() < deadline:
        time.sleep(0.01)


def _before_fork() -> None:
    _forking.held = _fork_lock.acquire(timeout=_MAX_FORK_WAIT_S)


def _after_fork_in_parent() -> None:
    if _forking.held:
        _fork_lock.release()


def _after_fork_in_child() -> None:
    global _fork_lock  # noqa: PLW0603 - the holder of the old lock is not in this process
    if _forking.held:
        _fork_lock.release()
    else:
        _fork_lock = threading.RLock()
    _unfinished.clear()
    _drop_half_imported()


def _drop_half_imported() -> None:
    """Unlock what another thread of the parent was importing.

    This child imports it again, or fails to: initializing libraries such as torch's twice crashes.
    """
    locks = getattr(_bootstrap, "_module_locks", {})  # private: weak references by module name
    for name, reference in tuple(locks.items()):
        lock = reference()
        if getattr(lock, "owner", None) not in {None, threading.get_ident()}:
            del locks[name]
            for module in tuple(sys.modules):
                if f"{module}.".startswith(f"{name}."):
                    del sys.modules[module]
            if name.partition(".")[0] not in _REIMPORTED:
                sys.modules[name] = None  # type: ignore[assignment]  # an ImportError


atexit.register(_before_exit)
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
