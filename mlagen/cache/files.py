"""Reading and writing single files of the store, trusting nothing that is found there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# What opening a path without following or waiting may say of it, besides a plain failure to read.
_INSTEAD_OF_A_FILE = {
    errno.ENOENT: "nothing",
    errno.ENOTDIR: "nothing",
    errno.ELOOP: "a symbolic link",
    errno.ENXIO: "a socket",
    errno.EIO: "an input/output error",
}


class DamageError(Exception):
    """Something in the store is not as it was published; the message says what."""


def read_regular(path: Path, *, most_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``most_bytes``.

    Raises
    ------
    DamageError
        If the path is anything else; a FIFO or a device is neither read nor waited for.
    OSError
        If this process may not or can not read it, which proves nothing about the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _read(descriptor, path.name, most_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        if found := _INSTEAD_OF_A_FILE.get(error.errno or 0):
            raise DamageError(f"{path.name}: expected a regular file, got {found}") from error
        raise


def _read(descriptor: int, name: str, most_bytes: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise DamageError(f"{name}: expected a regular file, got another kind")
    if status.st_size > most_bytes:
        raise DamageError(f"{name}: expected at most {most_bytes} bytes, got {status.st_size}")
    with open(descriptor, "rb", closefd=False) as file:
        return file.read(most_bytes)


def write_new(path: Path, content: bytes) -> None:
    """Write a file that must not exist yet, readable by its owner, and wait for the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make_folder(path: Path) -> None:
    """Create a folder for its owner alone, and what is missing above it, if it is not there."""
    missing = [path]
    while not (above := missing[-1].parent).exists() and above != missing[-1]:
        missing.append(above)
    for folder in reversed(missing):
        # The loop, because `mkdir(parents=True)` gives its mode to the last folder only.
        folder.mkdir(mode=0o700, exist_ok=True)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return which file or folder stands at a path now, or None if none does."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino
