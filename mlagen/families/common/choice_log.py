"""DEBUG log of the plan: why a call takes its kernel, its tile and its grid.

A call is planned, and logged, once for each signature.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mlagen.errors import UnsupportedError

_logger = logging.getLogger("mlagen")


def decline(why: Callable[[], UnsupportedError], *, is_forced: bool) -> None:
    """Log why an sm90 kernel falls back to the sm80 kernel, or raise if it is forced."""
    if is_forced:
        raise why()
    if _logger.isEnabledFor(logging.DEBUG):
        _, _, reason = str(why()).partition("=sm90: ")
        log_declined(reason)


def log_declined(reason: str) -> None:
    """Log why a call takes the sm80 kernel."""
    _logger.debug("planning: sm80 kernel: %s", reason)


def log_choice(spec: Any, plan: Any, *, requests: int, rows: int, max_kv_len: int) -> None:
    """Log the kernel, tile and grid of a call with their reasons.

    Parameters
    ----------
    spec, plan
        The kernel and its launch plan.
    requests : int
        Sequences; for sparse calls query tokens.
    rows : int
        Query tokens of a request, times the heads that share a KV head.
    max_kv_len : int
        Maximum number of tokens that a row attends to.
    """
    if not _logger.isEnabledFor(logging.DEBUG):
        return
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
        requests,
        max_kv_len,
        details,
    )
