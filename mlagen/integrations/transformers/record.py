"""What served each attention call: a log line for each new reason, and counts."""

from __future__ import annotations

import logging

import torch

_logger = logging.getLogger("mlagen")
_HINT = (
    "; kernels serve decode steps over a static cache (cache_implementation='static'), and "
    "mlagen.integrations.transformers.explain() counts the calls"
)
_calls: dict[str, int] = {}


def record(served_by: str, *, is_missed: bool = False) -> None:
    """Count a call, and log the first one of its kind; compiled code is neither.

    A decode step that kernels could serve with other options, and sdpa does, is a warning.
    """
    if torch.compiler.is_compiling():
        return
    if served_by not in _calls:
        level = logging.WARNING if is_missed else logging.INFO
        _logger.log(level, "transformers: attention by %s%s", served_by, _HINT if is_missed else "")
    _calls[served_by] = _calls.get(served_by, 0) + 1


def explain() -> dict[str, int]:
    """Return how many attention calls each kernel served, and why ``sdpa`` served the others.

    Returns
    -------
    dict of str to int
        Calls outside of compiled code since the process began, such as ``{"mlagen GQA, pages of 64
        tokens": 64, "sdpa: more than one query token": 2}``. A model's layer is one call.
    """
    return dict(_calls)
