"""Reads and writes of single files; nothing on the disk is trusted."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

# Errors of a non-following, non-blocking open that mean damage rather than a read failure.
_DAMAGE_ERRNOS = {
    errno.ENOENT: "nothing",
    errno.ENOTDIR: "nothing",
    errno.ELOOP: "a symbolic link",
    errno.ENXIO: "a socket",
    errno.EIO: "an input/output error",
}

# Distinguishes a folder from its successors at the same path.
Identity: TypeAlias = tuple[int, int, int]


class DamageError(Exception):
    """Something in the store differs from what was published; the message names it."""


def read_with_status(
    path: Path | str,
    *,
    max_bytes: int,
    folder: int | None = None,
    check: Callable[[os.stat_result], None] | None = None,
) -> tuple[bytes, os.stat_result]:
    """Return the content of a regular file of at most ``max_bytes``, and its status.

    Parameters
    ----------
    path : Path or str
        The file to read.
    max_bytes : int
        Maximum size of the file.
    folder : int, optional
        Descriptor of the open folder that ``path`` is relative to.
    check : Callable[[os.stat_result], None], optional
        Raises if the opened file must not be read.

    Raises
    ------
    DamageError
        If the path is anything else; FIFOs and devices are not read and do not block.
    OSError
        If this process cannot read it, which is no proof of damage.
    """
    name = os.path.basename(path)  # noqa: PTH119 - a Path for each of thousands is slow
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, dir_fd=folder)
        try:
            return _read(descriptor, name, max_bytes, check)
        finally:
            os.close(descriptor)
    except OSError as error:
        if found := _DAMAGE_ERRNOS.get(error.errno or 0):
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
        # Bounded by the file size: os.read allocates the requested size up front.
        part = os.read(descriptor, missing)
        if not part:
            break  # truncated meanwhile: the digest check fails
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
    """Write a file that must not exist yet, and sync it if ``waits``.

    ``folder`` is the descriptor of the open folder that ``path`` is relative to.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode, dir_fd=folder), "wb") as file:
        file.write(content)
        file.flush()
        if waits:
            os.fsync(file.fileno())


def make_folder(path: Path, *, mode: int = 0o700) -> None:
    """Create a folder and its missing parents."""
    missing = [path]
    while not (above := missing[-1].parent).exists() and above != missing[-1]:
        missing.append(above)
    for folder in reversed(missing):
        # A loop, because `mkdir(parents=True)` applies the mode to the last folder only.
        folder.mkdir(mode=mode, exist_ok=True)


def sync_folder(path: Path) -> None:
    """Sync the directory entries of a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def identity_of(path: Path | str, folder: int | None = None) -> Identity | None:
    """Return the identity of the file or folder at a path, or None if there is none.

    ``folder`` is the descriptor of the open folder that ``path`` is relative to.
    """
    try:
        status = os.stat(path, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if is_gone(error):
            return None
        raise
    return identity_of_status(status)


def identity_of_status(status: os.stat_result) -> Identity:
    """Return the identity of the file or folder with a status."""
    # With the time, because a new folder may reuse the inode of one that was just deleted.
    return status.st_dev, status.st_ino, status.st_mtime_ns


def is_gone(error: OSError) -> bool:
    """Whether an error means that a path does not exist, rather than that it is unreadable.

    ESTALE is the error of a network file system for a file that another machine removed.
    """
    return error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
