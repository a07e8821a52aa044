"""Reading and writing single files of the store, trusting nothing that is found there."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

# What opening a path without following or waiting may say of it, besides a plain failure to read.
_INSTEAD_OF_A_FILE = {
    errno.ENOENT: "nothing",
    errno.ENOTDIR: "nothing",
    errno.ELOOP: "a symbolic link",
    errno.ENXIO: "a socket",
    errno.EIO: "an input/output error",
}

# Tells a folder from its successors in the same place.
Identity: TypeAlias = tuple[int, int, int]


class DamageError(Exception):
    """Something in the store is not as it was published; the message says what."""


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``max_bytes``.

    Raises
    ------
    DamageError
        If the path is anything else; a FIFO or a device is neither read nor waited for.
    OSError
        If this process may not or can not read it, which proves nothing about the file.
    """
    return read_with_status(path, max_bytes=max_bytes)[0]


def read_with_status(
    path: Path | str,
    *,
    max_bytes: int,
    folder: int | None = None,
    check: Callable[[os.stat_result], None] | None = None,
) -> tuple[bytes, os.stat_result]:
    """Do the same, and return what the file system says of the file too.

    Parameters
    ----------
    path : Path or str
        What to read.
    max_bytes : int
        How large it may be.
    folder : int, optional
        The descriptor of an open folder that ``path`` starts from.
    check : Callable[[os.stat_result], None], optional
        Raises if the file that was opened must not be read.
    """
    name = os.path.basename(path)  # noqa: PTH119 - of thousands of texts, no path for each
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, dir_fd=folder)
        try:
            return _read(descriptor, name, max_bytes, check)
        finally:
            os.close(descriptor)
    except OSError as error:
        if found := _INSTEAD_OF_A_FILE.get(error.errno or 0):
            raise DamageError(f"{name}: expected a regular file, got {found}") from error
        raise


def _read(
    descriptor: int,
    name: str,
    max_bytes: int,
    check: Callable[[os.stat_result], None] | None,
) -> tuple[bytes, os.stat_result]:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise DamageError(f"{name}: expected a regular file, got another kind")
    if check is not None:
        check(status)
    if status.st_size > max_bytes:
        raise DamageError(f"{name}: expected at most {max_bytes} bytes, got {status.st_size}")
    content = b""
    while missing := status.st_size - len(content):
        # Not more than that at once: Python would make room for all that it is asked for.
        part = os.read(descriptor, missing)
        if not part:
            break  # cut off meanwhile: its digest will not be the right one
        content = content + part if content else part
    return content, status


def write_new(
    path: Path | str,
    content: bytes,
    *,
    mode: int = 0o600,
    waits: bool = True,
    folder: int | None = None,
) -> None:
    """Write a file that must not exist yet, and wait for the disk unless that is too much.

    ``folder`` is the descriptor of an open folder that ``path`` starts from.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode, dir_fd=folder), "wb") as file:
        file.write(content)
        file.flush()
        if waits:
            os.fsync(file.fileno())


def make_folder(path: Path, *, mode: int = 0o700) -> None:
    """Create a folder, and what is missing above it, if it is not there."""
    missing = [path]
    while not (above := missing[-1].parent).exists() and above != missing[-1]:
        missing.append(above)
    for folder in reversed(missing):
        # The loop, because `mkdir(parents=True)` gives its mode to the last folder only.
        folder.mkdir(mode=mode, exist_ok=True)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def identity_of(path: Path | str, folder: int | None = None) -> Identity | None:
    """Return which file or folder stands at a path now, or None if none does.

    ``folder`` is the descriptor of an open folder that ``path`` starts from.
    """
    try:
        status = os.stat(path, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if is_gone(error):
            return None
        raise
    return identity_of_status(status)


def identity_of_status(status: os.stat_result) -> Identity:
    """Return which file or folder has a status."""
    # With the time, because a new folder may get the number of one that was just deleted.
    return status.st_dev, status.st_ino, status.st_mtime_ns


def is_gone(error: OSError) -> bool:
    """Whether an error says that nothing is there, not that it cannot be read.

    A stale handle is what a network folder says of a file that another machine removed.
    """
    return error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
