"""Lines of the log at DEBUG: why a call takes its kernel, its tile and its grid.

A call is planned once for each form of its arguments; nothing is logged when it is made again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mlagen.errors import UnsupportedError

_logger = logging.getLogger("mlagen")


def decline(why: Callable[[], UnsupportedError], *, is_forced: bool) -> None:
    """Log why a sm90 kernel leaves a call to the portable one, or raise if it may not."""
    if is_forced:
        raise why()
    if _logger.isEnabledFor(logging.DEBUG):
        _, _, reason = str(why()).partition("=sm90: ")
        log_declined(reason)


def log_declined(reason: str) -> None:
    """Log why a call takes the sm80 kernel."""
    _logger.debug("planning: sm80 kernel: %s", reason)


def log_choice(spec: Any, plan: Any, *, requests: int, rows: int, max_kv_len: int) -> None:
    """Log what a call takes, and what that follows from.

    Parameters
    ----------
    spec, plan
        The kernel, and how it is launched.
    requests : int
        Sequences; of a sparse call query tokens.
    rows : int
        Query tokens of a request, times the heads that share a KV head.
    max_kv_len : int
        Tokens that a row may attend to, at the most.
    """
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    block_m = spec.block_m if hasattr(spec, "block_m") else spec.tile.block_m
    if rows <= block_m:
        why = "one tile holds them"
    elif block_m in dict(getattr(spec, "smaller_tiles", ())):
        why = f"{-(-rows // block_m)} small tiles occupy more SMs, as there is little KV"
    else:
        why = f"{-(-rows // block_m)} of the largest tiles"
    facts = ", ".join(f"{name} {value}" for name, value in vars(plan).items() if name != "blocks")
    _logger.debug("planning: kernel %s", spec)
    _logger.debug("planning: tile of %d rows for requests of %d rows: %s", block_m, rows, why)
    _logger.debug(
        "planning: grid of %d CTAs for %d requests of up to %d KV tokens: %s",
        plan.blocks,
        requests,
        max_kv_len,
        facts,
    )
