"""Recursive delete and size below a folder handle, without following links."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def delete_tree(name: str, folder: int) -> None:
    """Delete a tree by its name in an open folder; undeletable items stay."""
    # `shutil.rmtree` has no `dir_fd` before Python 3.11.
    with suppress(OSError, RecursionError), _opened(name, folder) as child:
        for each in os.listdir(child):  # noqa: PTH208 - no path leads here
            delete_tree(each, child)
    with suppress(OSError):  # not a folder, or not empty
        os.rmdir(name, dir_fd=folder)
        return
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)


def tree_size(name: str, folder: int) -> int:
    """Return the total size of the readable files below a name in an open folder."""
    with suppress(OSError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            return status.st_size
    size = 0
    with suppress(OSError, RecursionError), _opened(name, folder) as child:
        for each in os.listdir(child):  # noqa: PTH208 - no path leads here
            size += tree_size(each, child)
    return size


@contextmanager
def _opened(name: str, folder: int) -> Iterator[int]:
    descriptor = os.open(name, _FLAGS, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
