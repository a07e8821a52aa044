"""One compile a kernel: a lock between processes, and single flight between threads.

Both avoid duplicate compiles; correctness does not depend on them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from mlagen.cache.trust import make_folder, require_own_folder
from mlagen.monitoring import count

Result = TypeVar("Result")

_POLL_S = 0.05
_PROGRESS_S = 10.0

# A full disk or exhausted process limits; publishing warns of them later.
_RESOURCE_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}

_logger = logging.getLogger("mlagen")


class _Held:
    """The open file of a lock; the lock is free once every copy of its descriptor is closed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        """Close it, once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_held: set[_Held] = set()


@contextmanager
def compile_lock(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold the lock of one kernel; continue without it after ``timeout_s``, or if locking fails.

    The operating system releases the lock of a process that dies. The lock file is never deleted:
    holders of a deleted file and of its successor would not exclude each other.
    """
    lock = _acquire(path, timeout_s)
    try:
        yield
    finally:
        if lock is not None:
            _held.discard(lock)
            lock.close()


def _acquire(path: Path, timeout_s: float) -> _Held | None:
    try:
        if not _is_usable(path.parent):
            return None
        if lock := _try_lock(path):
            return lock
        start = time.monotonic()
        count("waits")
        try:
            return _wait(path, start, timeout_s)
        finally:
            count("wait_ms", (time.monotonic() - start) * 1e3)
    except OSError as error:
        _logger.info("lock: expected to work, got %s, compiling without: %s", error, path)
        return None


def _try_lock(path: Path) -> _Held | None:
    """Return the lock of a file, created if it is missing, or None if another process has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_deleted = not os.fstat(descriptor).st_nlink  # others lock its successor
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    if is_deleted:
        os.close(descriptor)
        return None
    lock = _Held(descriptor)
    _held.add(lock)
    return lock


def _wait(path: Path, start: float, timeout_s: float) -> _Held | None:
    progress_s = _PROGRESS_S
    while (waited_s := time.monotonic() - start) < timeout_s:
        if waited_s >= progress_s:
            progress_s += _PROGRESS_S
            _logger.info("waiting %.0f s for another process to compile: %s", waited_s, path)
        time.sleep(min(_POLL_S, timeout_s - waited_s))
        if lock := _try_lock(path):
            return lock
    count("lock_timeouts")
    message = "lock: expected within %g s, got none, compiling without: %s"
    _logger.warning(message, timeout_s, path)
    return None


def _is_usable(folder: Path) -> bool:
    try:
        make_folder(folder)
        require_own_folder(folder, advice="choose another MLAGEN_LOCK_DIR")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        if error.errno in _RESOURCE_ERRORS:
            raise
        _warn(folder, error.strerror or str(error))
        return False
    return True


@cache
def _warn(folder: Path, why: str) -> None:
    message = "lock: expected a folder of this user, got %s, compiling without: %s"
    _logger.warning(message, why, folder)


class SingleFlight(Generic[Result]):
    """Active calls, by key.

    There is no mutex that a fork could copy locked: ``dict.setdefault`` elects the worker. The
    process id is part of the key, since a forked child has none of its parent's threads and would
    wait for their results for ever.
    """

    def __init__(self) -> None:
        self._flights: dict[tuple[int, str], tuple[Future[Result], int]] = {}

    def run(self, key: str, work: Callable[[], Result]) -> Result:
        """Return or raise the result of ``work``, which runs once for concurrent calls of a key.

        Raises
        ------
        RuntimeError
            If ``work`` requests its own key, which would deadlock.
        """
        mine: Future[Result] = Future()
        place = (os.getpid(), key)
        flight, thread = self._flights.setdefault(place, (mine, threading.get_ident()))
        if flight is not mine:
            if thread == threading.get_ident():
                raise RuntimeError(f"kernel {key}: expected no request while building it, got one")
            return flight.result()
        try:
            result = work()
        except BaseException as error:
            del self._flights[place]
            mine.set_exception(error)
            raise
        del self._flights[place]
        mine.set_result(result)
        return result


def _after_fork() -> None:
    # A child has copies of the descriptors, which would keep the locks of a parent that dies.
    for lock in _held:
        lock.close()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
