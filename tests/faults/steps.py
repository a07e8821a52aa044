"""The steps of the store: every call that changes the disk, so that tests can fail each of them."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlagen.artifacts import Build
from mlagen.cache.file import CacheEntry
from mlagen.cache.key import CacheKey
from mlagen.cache.store import KernelStore, verify
from tests.cache.builds import make_build, make_key
from tests.fixture_types import Log, Patch

KEY = make_key()
Act = Callable[[str], object]

_WRITING = os.O_CREAT | os.O_WRONLY | os.O_RDWR


def store_in(folder: Path, **options: Any) -> KernelStore:
    """Return a store with a limit, so that a publication cleans up too."""
    options = {"lock_timeout_s": 60.0, "max_bytes": 1 << 30, **options}
    return KernelStore(folder / "cache", lock_dir=folder / "locks", **options)


def ask(folder: Path, key: CacheKey = KEY, build: Callable[[], Build] = make_build) -> CacheEntry:
    """Request a kernel from a new store in ``folder``, like another process."""
    return store_in(folder).find_or_build(key, build)


def whole_entries(folder: Path) -> int:
    """Return the number of entries in ``folder``; a partial entry is an error."""
    stored = list(store_in(folder).entries())
    assert [verify(entry) for entry in stored] == [None] * len(stored)
    return len(stored)


def warnings_in(caplog: Log) -> list[str]:
    """Return the logged warnings."""
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def parts(folder: Path) -> list[Path]:
    """Return the temporary files in the cache in ``folder``."""
    return list((folder / "cache").glob("v2/*/.*"))


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

    def write(descriptor: int, content: Any) -> int:
        try:
            before("write")
        except OSError:
            real_write(descriptor, content[: len(content) // 2])
            raise
        written = real_write(descriptor, content)
        after("write")
        return written

    real_open, real_write = os.open, os.write
    for name in ("mkdir", "link", "rename", "utime", "unlink", "rmdir"):
        patch.setattr(os, name, around(name, getattr(os, name)))
    patch.setattr(os, "fsync", around("fsync", sync))
    patch.setattr(os, "open", open_)
    patch.setattr(os, "write", write)
