"""Keywords of TensorRT-LLM's signature that ask for nothing here, and the orders it has had."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.api.arguments import refuse, require_float32, shown
from mlagen.errors import UnsupportedError


def in_order(factor: Any, enable_pdl: Any, backend: str) -> tuple[Any, Any, str]:
    """Return the three as they were meant, in the older positional order or the newer.

    Raises
    ------
    ArgumentError
        If the first is nothing that it can be in its order.
    """
    # The older order has no skip_softmax_threshold_scale_factor: the others stand one place early.
    if isinstance(enable_pdl, str):
        if factor is not None and not isinstance(factor, bool):
            refuse("enable_pdl", "a bool or None", shown(factor))
        return None, factor, enable_pdl
    if isinstance(factor, bool) and enable_pdl is None:
        return None, factor, backend
    if factor is not None:
        require_float32(factor, "skip_softmax_threshold_scale_factor")
    return factor, enable_pdl, backend


# What a keyword is when nothing is asked of it.
_NEUTRAL = {
    "skip_softmax_threshold_scale_factor": None,
    "cute_dsl_impl": "auto",
    "kv_scale_format": "auto",
    "multi_ctas_kv_counter_buffer": None,
    "enable_dcp": False,
    "cp_world": 1,
    "cp_rank": 0,
    "causal_seqlens_kv_global": None,
    "use_fp16_softmax": None,
}


def refuse_keyword(given: dict[str, object]) -> None:
    """Refuse the first keyword that asks for what is not implemented.

    Raises
    ------
    UnsupportedError
        If there is one.
    """
    for keyword, neutral in _NEUTRAL.items():
        value = given[keyword]
        is_asked = isinstance(value, torch.Tensor) or (
            bool(value) if neutral is None or neutral is False else value != neutral
        )
        if is_asked:
            rule = f"not implemented, expected {neutral!r}"
            raise UnsupportedError(f"{keyword}: {rule}, got {shown(value)}")
