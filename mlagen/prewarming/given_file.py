"""Files that a caller names."""

from __future__ import annotations

from pathlib import Path

from mlagen.errors import ArgumentError


def read_given(path: Path) -> bytes:
    """Return what a file holds.

    Raises
    ------
    ArgumentError
        If it cannot be read; the message names it.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArgumentError(
            f"{path}: expected a readable file, got {error.strerror or error}"
        ) from error
