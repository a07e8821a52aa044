"""Deleting and measuring what lies below a name, from handle to handle and across no link."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def delete_tree(name: str, folder: int) -> None:
    """Delete what has a name in an open folder; what cannot be deleted stays."""
    # Not `shutil.rmtree`, whose `dir_fd` is missing before Python 3.11.
    with suppress(OSError, RecursionError), _opened(name, folder) as inner:
        for each in os.listdir(inner):  # noqa: PTH208 - no path leads here
            delete_tree(each, inner)
    with suppress(OSError):  # no folder, or one that holds what cannot be deleted
        os.rmdir(name, dir_fd=folder)
        return
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)


def tree_size(name: str, folder: int) -> int:
    """Return the bytes of the files below a name in an open folder, as far as they can be seen."""
    with suppress(OSError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            return status.st_size
    size = 0
    with suppress(OSError, RecursionError), _opened(name, folder) as inner:
        for each in os.listdir(inner):  # noqa: PTH208 - no path leads here
            size += tree_size(each, inner)
    return size


@contextmanager
def _opened(name: str, folder: int) -> Iterator[int]:
    descriptor = os.open(name, _FLAGS, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
