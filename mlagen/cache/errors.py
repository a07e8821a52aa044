"""Conversion of operating-system errors into :class:`mlagen.CacheError`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlagen.cache.trust import UntrustedError
from mlagen.errors import CacheError

# Errors that another cache folder avoids; trust errors have their own advice.
_AVOIDABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}


class UnreadableError(CacheError):
    """An entry that this process cannot read, which is no proof of damage."""


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
    except OSError as error:
        raise cache_error(
            error, path, expected=expected, suggests_folder=suggests_folder
        ) from error


def cache_error(
    error: OSError, path: Path, *, expected: str = "writable", suggests_folder: bool = False
) -> CacheError:
    """Return the :class:`CacheError` of an operating-system error."""
    rule = "trusted" if isinstance(error, UntrustedError) else expected
    got = f"{error.strerror or error}{advice_for(error) if suggests_folder else ''}"
    return CacheError(f"cache: expected a {rule} folder, got {got}: {path}", path=path)


def unreadable_text(error: OSError) -> str:
    """Return the problem of an entry that this process cannot read."""
    return f"expected a readable entry, got {error.strerror or error}"


def advice_for(error: OSError) -> str:
    """Return the advice to set another cache folder, in parentheses, if that avoids the error."""
    code = error.errno or 0
    if code in _AVOIDABLE and error.strerror == os.strerror(code):
        return " (set MLAGEN_CACHE_DIR or XDG_CACHE_HOME to a folder that can be written)"
    return ""
