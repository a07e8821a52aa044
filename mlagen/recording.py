"""What a run asked for, line by line, for ``mlagen prewarm --from-log``."""

from __future__ import annotations

import json
import logging
import os
from functools import cache
from pathlib import Path

_logger = logging.getLogger("mlagen")


def record(path: Path, *, kernel: str, key: str, toolchain: str, found: str) -> None:
    """Append a kernel to the record; a record that cannot be written is said once."""
    line = {"kernel": kernel, "key": key, "toolchain": toolchain, "found": found}
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        # One write, so that lines of several processes do not mix.
        descriptor = os.open(path, flags, 0o644)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        _warn(path, error.strerror)


@cache
def _warn(path: Path, why: str) -> None:
    _logger.warning("MLAGEN_RECORD: expected a file that can be written, got %s: %s", why, path)
