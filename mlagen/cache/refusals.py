"""What the disk refuses, as the error that callers of the store see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlagen.cache.trust import UntrustedError
from mlagen.errors import CacheError


@contextmanager
def refusals(path: Path, *, to: str = "writable") -> Iterator[None]:
    """Turn what the disk says into a :class:`CacheError`; ``to`` says what a folder must be."""
    try:
        yield
    except OSError as error:
        raise refused(error, path, to=to) from error


def refused(error: OSError, path: Path, *, to: str = "writable") -> CacheError:
    """Return the error of a store that is not what it must be."""
    what = "trusted" if isinstance(error, UntrustedError) else to
    message = f"cache: expected a {what} folder, got {error.strerror or error}: {path}"
    return CacheError(message, path=path)
