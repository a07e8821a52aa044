"""The mask of ``mlagen``: bounds of each sequence where a kernel serves the step, else sdpa's mask.

Bounds are int32 ``[batch, 1, 1, 2]``, the first token and the number of tokens. A third column
marks left padding, so that a shape alone chooses the pages, also in compiled code. Neither shape
broadcasts against scores: a model that adds to its mask fails, and is not silently wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from mlagen.integrations.transformers.record import record

_MIN_TOKENS = 16  # of a cache: more than bounds have columns


def decode_mask(**arguments: Any) -> torch.Tensor | None:
    """Return the bounds of a decode step over a static cache, or the mask of ``sdpa``."""
    if arguments["q_length"] == 1:
        reason = _unserved(**arguments)
        if not reason:
            return _bounds(**arguments)
        record(f"mask of sdpa: {reason}")
    mask: torch.Tensor | None = sdpa_mask(**arguments)
    return mask


def is_bounds(mask: torch.Tensor | None) -> bool:
    """Return whether a mask has bounds; anything that a model derives from them has other axes."""
    return mask is not None and mask.dtype == torch.int32 and tuple(mask.shape[1:3]) == (1, 1)


def bool_mask(bounds: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return bounds as bool ``[batch, 1, 1, tokens]``, for sdpa."""
    first, count = bounds[..., 0:1], bounds[..., 1:2]
    token = torch.arange(tokens, dtype=torch.int32, device=bounds.device)
    return (token >= first) & (token < first + count)


def _unserved(
    *,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    **_: Any,
) -> str:
    """Return why a step of one query token has no bounds, empty if it has."""
    rules = (
        (kv_offset == 0 and mask_function is causal_mask_function, "not causal, or a window"),
        (getattr(config, "index_topk", None) is None, "the indexer of the model reads it"),
        (kv_length >= _MIN_TOKENS, f"a cache of fewer than {_MIN_TOKENS} tokens"),
    )
    for is_met, reason in rules:
        if not is_met:
            return reason
    if not isinstance(q_offset, torch.Tensor):  # a static layer counts its tokens on the device
        return "the cache has no fixed length, as cache_implementation='static' has"
    return "" if attention_mask is None else _unserved_padding(attention_mask, q_offset)


def _unserved_padding(attention_mask: torch.Tensor, q_offset: torch.Tensor) -> str:
    """Return why padding is not served, empty if all of it is on the left."""
    is_capturing = attention_mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or is_capturing:
        return "a 2-D attention mask in compiled or captured code"
    if bool(attention_mask.all()):
        return ""
    width = attention_mask.shape[1]
    # What follows the padding reaches the end, and the end is the token of this step.
    are_left = attention_mask.sum(-1) + attention_mask.int().argmax(-1) == width
    return "" if bool(are_left.all() & (q_offset + 1 == width)) else "padding that is not left"


def _bounds(
    *,
    batch_size: int,
    q_offset: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    ends = (q_offset + 1).int().expand(batch_size)
    columns = [torch.zeros_like(ends), ends]
    if attention_mask is not None and not bool(attention_mask.all()):
        first = attention_mask.int().argmax(-1).int()
        columns = [first, ends - first, torch.ones_like(ends)]
    return torch.stack(columns, dim=-1)[:, None, None]
