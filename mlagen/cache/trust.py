"""Whose folder it is: a kernel runs on the GPU of whoever loads it, so not anybody's will do."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from mlagen.cache.files import DamageError
from mlagen.cache.layout import Layout

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def require_trusted(layout: Layout, folder: Path | None = None) -> None:
    """Raise :class:`PermissionError` if others could have put kernels into a store.

    Looked at are the root and the layout's own folders, as far as they are there, and ``folder``
    with what lies between. Each must be a folder of this user or of root that nobody else may
    write in. The root alone may be reached over a symbolic link. A shared layout trusts all.

    Raises
    ------
    FileNotFoundError
        If ``folder`` is not there.
    DamageError
        If ``folder`` is no folder.
    """
    if layout.is_shared:
        return
    for path in (layout.root, layout.version, layout.entries, layout.staging):
        with suppress(FileNotFoundError):
            _require_own(path, layout, follows=path == layout.root)
    if folder is not None:
        require_trusted_above(layout, folder)
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise DamageError(f"{folder.name}: expected a folder, got another kind")
        _require_own(folder, layout)


def require_trusted_above(layout: Layout, folder: Path) -> None:
    """Raise :class:`PermissionError` if others may write in the folders that hold an entry's."""
    for path in (folder.parents[1], folder.parent):
        require_trusted_folder(layout, path)


def require_trusted_folder(layout: Layout, folder: Path) -> None:
    """Raise :class:`PermissionError` if others may write in one folder of a store."""
    if not layout.is_shared:
        _require_own(folder, layout)


def require_own_folder(folder: Path, *, advice: str) -> None:
    """Raise :class:`PermissionError` if others than its owner and root may write in a folder."""
    _require_own_status(folder, folder.lstat(), advice)


def _require_own(path: Path, layout: Layout, *, follows: bool = False) -> None:
    status = path.stat() if follows else path.lstat()
    advice = f"chmod -R go-w {layout.root}, choose another folder, or set MLAGEN_TRUST_SHARED=1"
    _require_own_status(path, status, advice)


def _require_own_status(path: Path, status: os.stat_result, advice: str) -> None:
    if stat.S_ISLNK(status.st_mode):
        text = f"a symbolic link at {path}"
    elif not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    elif status.st_uid not in {os.geteuid(), 0}:
        text = f"a folder of user {status.st_uid} at {path}"
    elif status.st_mode & _OTHERS_MAY_WRITE:
        text = f"mode {stat.S_IMODE(status.st_mode):04o}, which lets others write, at {path}"
    else:
        return
    raise PermissionError(errno.EACCES, f"{text} ({advice})", str(path))
