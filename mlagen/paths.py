"""User-named paths: queries that do not raise, and reads and appends that do not block.

A path may lead to an unreachable network folder, a folder without search permission, a FIFO or a
device. ``Path.is_dir`` and similar methods raise for the first two; opening the others may block.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

# Above the size of any configuration, table of kernels or record file.
MAX_NAMED_BYTES = 64 << 20

# A regular-file check follows the open: until then a FIFO must not block, and a terminal must not
# become the controlling one.
_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def reason_of(error: Exception) -> str:
    """Return the reason of a file-system error, as the system reports it."""
    return getattr(error, "strerror", None) or str(error)


def folder_problem(path: Path) -> str | None:
    """Return why a path is no folder, ``none`` or a system error; None if it is one."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "none"
    except (OSError, ValueError) as error:  # the latter for a null character
        return reason_of(error)
    return None if stat.S_ISDIR(mode) else "none"


def is_folder(path: Path) -> bool:
    """Whether a path is a folder that this process can stat."""
    return folder_problem(path) is None


def is_regular(path: Path) -> bool:
    """Whether a path is a regular file that this process can stat."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def require_regular(path: Path) -> None:
    """Raise :class:`OSError` unless a path is a regular file.

    Callers check before they open: opening a device may have side effects.
    """
    _require_regular(path, path.stat())


def open_named(path: Path) -> IO[bytes]:
    """Open a user-named regular file for reading.

    Raises OSError if it is no regular file, or is unreadable; ValueError if the path contains a
    null character.
    """
    require_regular(path)
    file = os.fdopen(os.open(path, os.O_RDONLY | _FLAGS), "rb")
    try:
        _require_regular(path, os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def read_named(path: Path, *, max_bytes: int = MAX_NAMED_BYTES) -> bytes:
    """Return the content of a user-named regular file.

    Raises OSError if it is no regular file, exceeds ``max_bytes``, or is unreadable; ValueError if
    the path contains a null character.
    """
    with open_named(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes >> 20} MiB", str(path))
    return content


def append_named(
    path: Path, line: bytes, *, check: Callable[[os.stat_result], None] = lambda _: None
) -> None:
    """Append a line to a user-named regular file in one write; create it if it does not exist.

    ``check`` gets the status of the open file, and raises for one that must not be written. Raises
    OSError if it is no regular file, or is not writable; ValueError if the path contains a null
    character.
    """
    with suppress(FileNotFoundError):  # open creates the file, or raises for a missing folder
        require_regular(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _FLAGS, 0o644)
    try:
        status = os.fstat(descriptor)
        _require_regular(path, status)
        check(status)
        # One write: lines of several processes do not mix. On a full disk it may be a short one,
        # and the next one raises.
        while line := line[os.write(descriptor, line) :]:
            pass
    finally:
        os.close(descriptor)


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "another kind")
        raise OSError(errno.EINVAL, kind, str(path))
