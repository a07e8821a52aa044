"""Trust check and errors of folders: no other user can change what this process loads."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mlagen.errors import CacheError

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

# Errors that another cache folder avoids; trust errors have their own advice.
_AVOIDABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}


class UntrustedError(PermissionError):
    """Other users can change a folder or file of a store, or a link is in its place."""

    def __init__(self, text: str, path: str, advice: str) -> None:
        super().__init__(errno.EACCES, f"{text} ({advice})", path)


@dataclass(frozen=True)
class Rules:
    """The rules of one cache folder.

    With ``is_shared``, users other than the owner may write in it: they are trusted, and new files
    and folders get the mode of the umask.
    """

    root: Path
    is_shared: bool

    @property
    def folder_mode(self) -> int:
        """Mode of a new folder, before the umask."""
        return 0o777 if self.is_shared else 0o700

    @property
    def file_mode(self) -> int:
        """Mode of a new file, before the umask."""
        return 0o666 if self.is_shared else 0o600

    def require_trusted(self, status: os.stat_result, path: str) -> None:
        """Raise :class:`UntrustedError` if other users can change the file or folder of a status.

        It must belong to this user or to root, and have no write permission for group and others.
        A shared folder trusts every owner and mode, but no link.
        """
        if stat.S_ISLNK(status.st_mode):
            require_own(status, path, advice="remove it, or choose another folder")
        elif not self.is_shared and others_may_change(status):
            remedy = remedy_for(status, self.root)
            advice = f"{remedy}, choose another folder, or set MLAGEN_TRUST_SHARED=1"
            require_own(status, path, advice=advice)


def require_own(status: os.stat_result, path: str, *, advice: str, allowed: int = 0) -> None:
    """Raise :class:`UntrustedError` if users other than this one and root can write a file.

    ``allowed`` has the bits of its mode that are no reason. A link is never trusted.
    """
    if stat.S_ISLNK(status.st_mode):
        text = f"a symbolic link at {path}"
    elif is_foreign(status):
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "file"
        text = f"a {kind} of user {status.st_uid} at {path}"
    elif others_may_change(status, allowed):
        text = f"mode {stat.S_IMODE(status.st_mode):04o}, which lets others write, at {path}"
    else:
        return
    raise UntrustedError(text, path, advice)


def require_own_folder(folder: Path, *, advice: str) -> None:
    """Raise :class:`PermissionError` if users other than this one and root can write a folder."""
    status = folder.lstat()
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    require_own(status, str(folder), advice=advice)


def require_own_place(file: Path, *, advice: str) -> None:
    """Raise :class:`UntrustedError` if other users can replace a file, or the link to it.

    With the sticky bit, as in ``/tmp``, its folder may be writable for all: only the owners of the
    folder and of the file can replace it. The group of this process may write in the folder.
    """
    with suppress(FileNotFoundError):
        status = file.lstat()
        if stat.S_ISLNK(status.st_mode) and is_foreign(status):
            raise UntrustedError(f"a link of user {status.st_uid} at {file}", str(file), advice)
        file.stat()  # an OSError for a loop of links, for which resolve has another
    for folder in dict.fromkeys([file.parent, file.resolve().parent]):
        status = folder.stat()
        allowed = stat.S_IWGRP if status.st_gid == os.getegid() else 0
        allowed |= _OTHERS_MAY_WRITE if status.st_mode & stat.S_ISVTX else 0
        require_own(status, str(folder), advice=advice, allowed=allowed)


def remedy_for(status: os.stat_result, folder: Path) -> str:
    """Return the command that makes a folder and what is in it this user's own."""
    if is_foreign(status):
        return f"sudo chown -R {os.geteuid()} {folder}"
    sudo = "" if status.st_uid == os.geteuid() else "sudo "
    return f"{sudo}chmod -R go-w {folder}"


def others_may_change(status: os.stat_result, allowed: int = 0) -> bool:
    """Whether users other than this one and root can write a file."""
    return is_foreign(status) or bool(status.st_mode & _OTHERS_MAY_WRITE & ~allowed)


def is_foreign(status: os.stat_result) -> bool:
    """Whether a file belongs to a user other than this one and root."""
    return status.st_uid not in {os.geteuid(), 0}


def is_gone(error: OSError) -> bool:
    """Whether an error means that a path does not exist, rather than that it is unreadable.

    ESTALE is the error of a network file system for a file that another machine removed.
    """
    return error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


def make_folder(path: Path, *, mode: int = 0o700) -> None:
    """Create a folder and its missing parents."""
    missing = [path]
    while not (above := missing[-1].parent).exists() and above != missing[-1]:
        missing.append(above)
    for folder in reversed(missing):
        # A loop, because `mkdir(parents=True)` applies the mode to the last folder only.
        folder.mkdir(mode=mode, exist_ok=True)


@contextmanager
def raising_cache_errors(
    path: Path, *, expected: str = "writable", suggests_folder: bool = False
) -> Iterator[None]:
    """Convert an :class:`OSError` into a :class:`CacheError`.

    ``expected`` is the required property of the folder; with ``suggests_folder`` the message may
    suggest another cache folder.
    """
    try:
        yield
    except CacheError:
        raise
    except OSError as error:
        rule = "trusted" if isinstance(error, UntrustedError) else expected
        got = f"{error.strerror or error}{advice_for(error) if suggests_folder else ''}"
        message = f"cache: expected a {rule} folder, got {got}: {path}"
        raise CacheError(message, path=path) from error


def advice_for(error: OSError) -> str:
    """Return the advice to set another cache folder, in parentheses, if that avoids the error."""
    code = error.errno or 0
    if code in _AVOIDABLE and error.strerror == os.strerror(code):
        return " (set MLAGEN_CACHE_DIR or XDG_CACHE_HOME to a folder that can be written)"
    return ""
