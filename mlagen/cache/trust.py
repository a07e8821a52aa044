"""Trust check: kernels are loaded only from folders that no other user can change."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from mlagen.cache.layout import Layout

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedError(PermissionError):
    """Other users can change a folder or file of a store, or a link points outside."""

    def __init__(self, text: str, path: str, advice: str) -> None:
        super().__init__(errno.EACCES, f"{text} ({advice})", path)


def require_trusted(status: os.stat_result, path: str, layout: Layout) -> None:
    """Raise :class:`UntrustedError` if other users can change the file or folder of a status.

    It must belong to this user or to root, and have no write permission for group and others. A
    shared layout trusts every owner and mode, but no link.
    """
    if stat.S_ISLNK(status.st_mode):
        raise untrusted_link(path)
    if not layout.is_shared:
        remedy = remedy_for(status, layout.root)
        advice = f"{remedy}, choose another folder, or set MLAGEN_TRUST_SHARED=1"
        require_own(status, path, advice=advice)


def remedy_for(status: os.stat_result, folder: Path) -> str:
    """Return the command that makes a folder and what is in it this user's own."""
    if _is_foreign(status):
        return f"sudo chown -R {os.geteuid()} {folder}"
    return f"chmod -R go-w {folder}"


def require_trusted_link(status: os.stat_result, path: str, layout: Layout) -> None:
    """Raise :class:`UntrustedError` if the root is a link of another user."""
    if not layout.is_shared and _is_foreign(status):
        raise UntrustedError(
            f"a symbolic link of user {status.st_uid} at {path}", path, "choose another folder"
        )


def untrusted_link(path: str) -> UntrustedError:
    """Return the error for a link where a folder is expected."""
    return UntrustedError(f"a symbolic link at {path}", path, "remove it, or choose another folder")


def require_own_folder(folder: Path, *, advice: str) -> None:
    """Raise :class:`PermissionError` if users other than this one and root can write a folder."""
    status, path = folder.lstat(), str(folder)
    if stat.S_ISLNK(status.st_mode):
        raise UntrustedError(f"a symbolic link at {path}", path, advice)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    require_own(status, path, advice=advice)


def require_own_place(file: Path, *, advice: str) -> None:
    """Raise :class:`UntrustedError` if other users can replace a file, or the link to it.

    With the sticky bit, as in ``/tmp``, its folder may be writable for all: only the owners of the
    folder and of the file can replace it. The group of this process may write in the folder.
    """
    with suppress(FileNotFoundError):
        status = file.lstat()
        if stat.S_ISLNK(status.st_mode) and _is_foreign(status):
            raise UntrustedError(f"a link of user {status.st_uid} at {file}", str(file), advice)
        file.stat()  # an OSError for a loop of links, for which resolve has another
    for folder in dict.fromkeys([file.parent, file.resolve().parent]):
        status = folder.stat()
        allowed = stat.S_IWGRP if status.st_gid == os.getegid() else 0
        allowed |= _OTHERS_MAY_WRITE if status.st_mode & stat.S_ISVTX else 0
        require_own(status, str(folder), advice=advice, allowed=allowed)


def require_own(status: os.stat_result, path: str, *, advice: str, allowed: int = 0) -> None:
    """Raise :class:`UntrustedError` if users other than this one and root can write a file.

    ``allowed`` has the bits of its mode that are no reason.
    """
    if _is_foreign(status):
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "file"
        text = f"a {kind} of user {status.st_uid} at {path}"
    elif status.st_mode & _OTHERS_MAY_WRITE & ~allowed:
        text = f"mode {stat.S_IMODE(status.st_mode):04o}, which lets others write, at {path}"
    else:
        return
    raise UntrustedError(text, path, advice)


def _is_foreign(status: os.stat_result) -> bool:
    """Whether a file belongs to a user other than this one and root."""
    return status.st_uid not in {os.geteuid(), 0}
