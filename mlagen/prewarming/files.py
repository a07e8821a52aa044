"""Input files: records and spec files."""

from __future__ import annotations

from pathlib import Path

from mlagen.errors import ArgumentError
from mlagen.paths import read_named, reason_of


def read_input_file(path: Path) -> bytes:
    """Return the content of a file.

    Raises
    ------
    ArgumentError
        If it cannot be read, is not a regular file, or is too large; the message names it.
    """
    try:
        return read_named(path)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: expected a readable file, got {reason_of(error)}") from error
