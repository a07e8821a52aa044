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
from importlib.machinery import EXTENSION_SUFFIXES

# A fork proceeds after this: a child that may hang is better than a parent that hangs.
_MAX_FORK_WAIT_S = 10.0

# The process exits after this; the work that it waits for takes a few seconds.
_MAX_EXIT_WAIT_S = 30.0

# Packages whose extension modules a child can initialize again.
_REINITIALIZED = sys.stdlib_module_names | {"markupsafe"}

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
    halted = set()
    locks = getattr(_bootstrap, "_module_locks", {})  # private: weak references by module name
    for name, reference in tuple(locks.items()):
        lock = reference()
        if getattr(lock, "owner", None) not in {None, threading.get_ident()}:
            del locks[name]
            if _has_extension(name.partition(".")[0]):
                halted.add(name)
            for module in tuple(sys.modules):
                if f"{module}.".startswith(f"{name}."):
                    del sys.modules[module]
    if halted:
        sys.meta_path.insert(0, _Halted(halted))


def _has_extension(package: str) -> bool:
    """Whether a package has loaded an extension module, which may initialize a library."""
    files = (
        getattr(module, "__file__", None) or ""
        for name, module in tuple(sys.modules.items())
        if name.partition(".")[0] == package
    )
    return package not in _REINITIALIZED and any(
        file.endswith(tuple(EXTENSION_SUFFIXES)) for file in files
    )


class _Halted:
    """The finder of modules that a child cannot import."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise ImportError for such a module."""
        del path, target
        if name in self._names:
            raise ImportError(
                f"{name}: another thread was importing it when this process was forked; import it "
                "before forks",
                name=name,
            )


atexit.register(_before_exit)
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
