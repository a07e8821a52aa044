"""The steps of the store: every call that changes the disk, so that tests can fail each of them."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, final

from mlagen.artifacts import Build
from mlagen.cache.entry import CacheEntry
from mlagen.cache.key import CacheKey
from mlagen.cache.store import KernelStore
from tests.cache.builds import make_build, make_key
from tests.fixture_types import Log, Patch

KEY = make_key()
Act = Callable[[str], object]

_WRITING = os.O_CREAT | os.O_WRONLY | os.O_RDWR


def store_in(folder: Path, **options: Any) -> KernelStore:
    """Return a store with everything that a publication can write, including the size file."""
    options = {"lock_timeout_s": 60.0, "max_bytes": 1 << 30, **options}
    return KernelStore(folder / "cache", lock_dir=folder / "locks", **options)


def ask(folder: Path, key: CacheKey = KEY, build: Callable[[], Build] = make_build) -> CacheEntry:
    """Request a kernel from a new store in ``folder``, like another process."""
    return store_in(folder).find_or_build(key, build)


def whole_entries(folder: Path) -> int:
    """Return the number of entries in ``folder``; a partial entry is an error."""
    store = store_in(folder)
    stored = list(store.entries())
    assert [store.verify(entry) for entry in stored] == [None] * len(stored)
    return len(stored)


def warnings_in(caplog: Log) -> list[str]:
    """Return the logged warnings."""
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def watch(
    patch: Patch,
    before: Act,
    after: Act = lambda _: None,
    sync: Callable[[int], object] = lambda _: None,
) -> None:
    """Call functions around every step: each call that changes the disk, or opens a file.

    An exception of ``before`` is raised by the call. A failing write has written one half.
    ``sync`` replaces the slow fsync of a descriptor.
    Garbage of other tests is not collected until the test ends, since its finalizers delete files,
    which are steps too.
    """
    gc.freeze()

    def around(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            before(name)
            result = call(*args, **kwargs)
            after(name)
            return result

        return step

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        name = "open" if flags & _WRITING else "look"
        return int(around(name, real_open)(path, flags, *args, **kwargs))

    def fdopen(descriptor: int, mode: str) -> _File:
        assert mode == "wb"
        return _File(real_fdopen(descriptor, "wb"), before, after)

    real_open, real_fdopen = os.open, os.fdopen
    for owner, name in (
        (os, "mkdir"),
        (os, "rename"),
        (os, "utime"),
        (os, "unlink"),
        (os, "rmdir"),
    ):
        patch.setattr(owner, name, around(name, getattr(owner, name)))
    patch.setattr(os, "fsync", around("fsync", sync))
    patch.setattr(os, "open", open_)
    patch.setattr(os, "fdopen", fdopen)


@final
class _File:
    """A file whose write, flush and close are steps."""

    def __init__(self, file: IO[bytes], before: Act, after: Act) -> None:
        self._file, self._before, self._after = file, before, after

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._before("close")
        finally:
            self._file.close()
        self._after("close")

    def write(self, content: bytes) -> None:
        """Write all of the content, or half of it."""
        try:
            self._before("write")
        except OSError:
            self._file.write(content[: len(content) // 2])
            self._file.flush()
            raise
        self._file.write(content)
        self._after("write")

    def flush(self) -> None:
        """Flush the content to the system."""
        self._before("flush")
        self._file.flush()
        self._after("flush")

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._file.fileno()
