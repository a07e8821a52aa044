"""DEBUG log of the plan: why a call takes its kernel, its tile and its grid.

A call is planned, and logged, once for each key and guard.
"""

from __future__ import annotations

import logging
from typing import Any

from mlagen.errors import UnsupportedError
from mlagen.families.common.problem import ProblemShape

_logger = logging.getLogger("mlagen")


def is_logged() -> bool:
    """Whether plans are logged."""
    return _logger.isEnabledFor(logging.DEBUG)


def reason_of(error: UnsupportedError) -> str:
    """Return why no sm90 kernel takes a call, without the setting that forces one."""
    return str(error).rpartition("=sm90: ")[2]


def log_declined(why: UnsupportedError) -> None:
    """Log why a call takes the sm80 kernel."""
    if is_logged():
        _logger.debug("planning: sm80 kernel: %s", reason_of(why))


def log_choice(spec: Any, plan: Any, shape: ProblemShape, max_seq_len: int) -> None:
    """Log the kernel, tile and grid of a call with their reasons.

    ``max_seq_len`` is the longest sequence, which ``shape`` has rounded up.
    """
    rows = shape.rows
    block_m = spec.block_m if hasattr(spec, "block_m") else spec.tile.block_m
    if rows <= block_m:
        why = "they fit in one tile"
    elif block_m in dict(getattr(spec, "smaller_tiles", ())):
        why = f"{-(-rows // block_m)} small tiles occupy more SMs, as the KV is short"
    else:
        why = f"{-(-rows // block_m)} of the largest tiles"
    fields = {name: value for name, value in vars(plan).items() if name != "num_ctas"}
    details = ", ".join(f"{name} {value}" for name, value in fields.items())
    _logger.debug("planning: kernel %s", spec)
    _logger.debug("planning: tile of %d rows for requests of %d rows: %s", block_m, rows, why)
    _logger.debug(
        "planning: grid of %d CTAs for %d requests of up to %d KV tokens: %s",
        plan.num_ctas,
        shape.batch,
        min(max_seq_len, shape.max_kv_len),
        details,
    )
