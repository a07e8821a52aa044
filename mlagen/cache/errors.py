"""What the disk rejects, as the error that callers of the store see."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlagen.cache.trust import UntrustedError
from mlagen.errors import CacheError

# What another folder helps against; whatever is wrong with trust has advice of its own.
_ELSEWHERE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}


@contextmanager
def rejections(path: Path, *, to: str = "writable", advises: bool = False) -> Iterator[None]:
    """Turn what the disk says into a :class:`CacheError`.

    ``to`` says what a folder must be; with ``advises`` the message may name another cache folder.
    """
    try:
        yield
    except OSError as error:
        raise rejected(error, path, to=to, advises=advises) from error


def rejected(
    error: OSError, path: Path, *, to: str = "writable", advises: bool = False
) -> CacheError:
    """Return the error of a store that is not what it must be."""
    what = "trusted" if isinstance(error, UntrustedError) else to
    got = f"{error.strerror or error}{advice_for(error) if advises else ''}"
    return CacheError(f"cache: expected a {what} folder, got {got}: {path}", path=path)


def advice_for(error: OSError) -> str:
    """Return what names another cache folder, in parentheses, if that is what helps."""
    code = error.errno or 0
    if code in _ELSEWHERE and error.strerror == os.strerror(code):
        return " (set MLAGEN_CACHE_DIR or XDG_CACHE_HOME to a folder that can be written)"
    return ""
