"""One compile a kernel: a lock between processes, and single flight between threads.

Both avoid duplicate compiles; correctness does not depend on them.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from mlagen.cache.trust import make_folder, require_own_folder
from mlagen.monitoring import count

if TYPE_CHECKING:
    from filelock import BaseFileLock

Result = TypeVar("Result")

_PROGRESS_S = 10.0

# A full disk or exhausted process limits; publishing warns of them later.
_RESOURCE_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}

_logger = logging.getLogger("mlagen")


def import_filelock() -> None:
    """Import filelock, which takes 40 ms, where no thread compiles yet.

    It registers at-fork handlers meanwhile, so that its import cannot defer forks.
    """
    with suppress(ImportError):  # inspecting a cache works without
        import filelock  # noqa: F401


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
            with suppress(OSError):
                lock.release()


def _acquire(path: Path, timeout_s: float) -> BaseFileLock | None:
    start = time.monotonic()
    try:
        from filelock import FileLock, Timeout

        if not _is_usable(path.parent):
            return None
        # A new object per call: one object shared by two threads admits both, or neither.
        lock = FileLock(path, fallback_to_soft=False)
        with suppress(Timeout):
            lock.acquire(timeout=0)
            return lock
        count("waits")
        try:
            return lock if _wait(lock, path, start, timeout_s) else None
        finally:
            count("wait_ms", (time.monotonic() - start) * 1e3)
    except (OSError, RuntimeError) as error:
        _logger.info("lock: expected to work, got %s, compiling without: %s", error, path)
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


def _wait(lock: BaseFileLock, path: Path, start: float, timeout_s: float) -> bool:
    from filelock import Timeout

    while True:
        remaining_s = timeout_s - (time.monotonic() - start)
        try:
            lock.acquire(timeout=max(0.0, min(_PROGRESS_S, remaining_s)))
        except Timeout:
            waited_s = time.monotonic() - start
            if waited_s >= timeout_s:
                count("lock_timeouts")
                message = "lock: expected within %g s, got none, compiling without: %s"
                _logger.warning(message, timeout_s, path)
                return False
            _logger.info("waiting %.0f s for another process to compile: %s", waited_s, path)
        else:
            return True


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

        Raises RuntimeError if ``work`` requests its own key, which would deadlock.
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
