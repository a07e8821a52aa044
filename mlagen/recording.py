"""Record file of kernel look-ups, one JSON line each, for ``mlagen prewarm --from-log``."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from mlagen.cache.trust import require_own, require_own_place
from mlagen.paths import append_named, reason_of

_ADVICE = "choose another MLAGEN_RECORD, or set MLAGEN_TRUST_SHARED=1"

_logger = logging.getLogger("mlagen")

_warned: set[Path] = set()


def record(
    path: Path, *, kernel: str, key: str, toolchain: str, found: str, is_shared: bool = False
) -> None:
    """Append a kernel to the record file; warn once if it is not writable.

    Unless ``is_shared``, no other user may be able to change it: a record decides what another
    process compiles.
    """
    line = {"kernel": kernel, "key": key, "toolchain": toolchain, "found": found}

    def check(status: os.stat_result) -> None:
        if not is_shared:
            require_own(status, str(path), advice=_ADVICE)

    try:
        if not is_shared:
            require_own_place(path, advice=_ADVICE)
        append_named(path, json.dumps(line).encode() + b"\n", check=check)
    except (OSError, ValueError) as error:
        if path not in _warned:
            _warned.add(path)
            message = "MLAGEN_RECORD: expected a file that can be written, got %s: %s"
            _logger.warning(message, reason_of(error), path)
