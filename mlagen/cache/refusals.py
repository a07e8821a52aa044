"""What the disk refuses, as the error that callers of the store see."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlagen.errors import CacheError

# What another folder helps against; whatever is wrong with trust has advice of its own.
_ELSEWHERE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}


@contextmanager
def refusals(path: Path, *, advises: bool = False) -> Iterator[None]:
    """Turn what the disk says into a :class:`CacheError`; it may name another cache folder."""
    try:
        yield
    except OSError as error:
        got = f"{error.strerror or error}{advice_for(error) if advises else ''}"
        message = f"cache: expected a writable folder, got {got}: {path}"
        raise CacheError(message, path=path) from error


def advice_for(error: OSError) -> str:
    """Return what names another cache folder, in parentheses, if that is what helps."""
    code = error.errno or 0
    if code in _ELSEWHERE and error.strerror == os.strerror(code):
        return " (set MLAGEN_CACHE_DIR or XDG_CACHE_HOME to a folder that can be written)"
    return ""
