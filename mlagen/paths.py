"""Paths that users name: asked without an exception, read and appended to without a wait.

A path may lead to a network folder that is gone, into a folder without search permission, or to a
FIFO or a device. ``Path.is_dir`` and its like raise for the former, opening the latter may block.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

# Larger than any configuration, table of kernels or record of a run.
MAX_NAMED_BYTES = 64 << 20

# No kind but a regular file is opened for long: a FIFO does not block, a terminal stays one.
_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def reason_of(error: Exception) -> str:
    """Return why the file system rejected, in its own words."""
    return getattr(error, "strerror", None) or str(error)


def folder_problem(path: Path) -> str | None:
    """Return what stands where a folder is expected: ``none`` or a reason; None if one does."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "none"
    except (OSError, ValueError) as error:  # the latter for a null character
        return reason_of(error)
    return None if stat.S_ISDIR(mode) else "none"


def is_folder(path: Path) -> bool:
    """Whether a folder stands at a path and this process can see it."""
    return folder_problem(path) is None


def is_regular(path: Path) -> bool:
    """Whether a regular file stands at a path and this process can see it."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def require_regular(path: Path) -> None:
    """Raise :class:`OSError` unless a regular file stands at a path.

    Asked before a file is opened: opening a device may have effects of its own.
    """
    _require_regular(path, path.stat())


def read_named(path: Path, *, max_bytes: int = MAX_NAMED_BYTES) -> bytes:
    """Return the content of a regular file that a user names.

    Raises
    ------
    OSError
        If it is no regular file, holds more than ``max_bytes``, or cannot be read.
    ValueError
        If the path holds a null character.
    """
    require_regular(path)
    with os.fdopen(os.open(path, os.O_RDONLY | _FLAGS), "rb") as file:
        _require_regular(path, os.fstat(file.fileno()))
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes >> 20} MiB", str(path))
    return content


def append_named(path: Path, line: bytes) -> None:
    """Append to a regular file that a user names, in one write; create it if it is not there.

    Raises
    ------
    OSError
        If it is no regular file, or cannot be written.
    ValueError
        If the path holds a null character.
    """
    with suppress(FileNotFoundError):  # opening creates it, or says what is missing
        require_regular(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _FLAGS, 0o644)
    try:
        _require_regular(path, os.fstat(descriptor))
        os.write(descriptor, line)  # one write: lines of several processes do not mix
    finally:
        os.close(descriptor)


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "another kind")
        raise OSError(errno.EINVAL, kind, str(path))
