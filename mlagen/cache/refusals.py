"""What the disk refuses, as the error that callers of the store see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlagen.errors import CacheError


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Turn what the disk says into a :class:`CacheError`."""
    try:
        yield
    except OSError as error:
        message = f"cache: expected a writable folder, got {error.strerror or error}: {path}"
        raise CacheError(message, path=path) from error
