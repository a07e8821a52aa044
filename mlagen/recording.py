"""Record file of kernel look-ups, one JSON line each, for ``mlagen prewarm --from-log``."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from mlagen.paths import append_named, reason_of

_logger = logging.getLogger("mlagen")

_warned: set[Path] = set()


def record(path: Path, *, kernel: str, key: str, toolchain: str, found: str) -> None:
    """Append a kernel to the record file; warn once if it is not writable."""
    line = {"kernel": kernel, "key": key, "toolchain": toolchain, "found": found}
    try:
        append_named(path, json.dumps(line).encode() + b"\n")
    except (OSError, ValueError) as error:
        if path not in _warned:
            _warned.add(path)
            message = "MLAGEN_RECORD: expected a file that can be written, got %s: %s"
            _logger.warning(message, reason_of(error), path)
