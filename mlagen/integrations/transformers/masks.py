"""The mask of ``mlagen``: bounds of each sequence where a kernel serves the step, else sdpa's mask.

Bounds are int32 ``[batch, 1, 1, 2]``, the first token and the number of tokens. A third column
marks left padding, and a fourth that a whole page lies behind it, so that a shape alone chooses the
pages, also in compiled code. No such shape broadcasts against scores: a model that adds to its mask
fails, and is not silently wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from mlagen.integrations.transformers.pages import PAGE_SIZE, is_capturing
from mlagen.integrations.transformers.record import record

_TOP_K = "_mlagen_top_k"  # an attribute of the mask of sdpa
_INDEXER = "the indexer of the model reads it"
_MIN_TOKENS = 16  # of a cache: more than bounds have columns


class _Padding(NamedTuple):
    """Padding on the left of a batch."""

    first: torch.Tensor  # int32 [batch]: the token behind it
    is_before_page: bool  # a whole page of the cache lies behind it, for every sequence


class TopK(NamedTuple):
    """Where an indexer's tokens are, and how many of them a sequence attends to."""

    rows: torch.Tensor  # int32 [batch, 1, 1]: the first token of a sequence, of those of a cache
    bounds: torch.Tensor  # int32 [batch, 1, 1, 2]: masked tokens come last


def decode_mask(**arguments: Any) -> torch.Tensor | None:
    """Return the bounds of a decode step over a static cache, or the mask of ``sdpa``."""
    if arguments["q_length"] == 1:
        reason, padding = _unserved(**arguments), None
        attention_mask = arguments.get("attention_mask")
        if not reason and attention_mask is not None:
            reason, padding = _padding_of(
                attention_mask, arguments["q_offset"], arguments["kv_length"]
            )
        if not reason:
            return _bounds(arguments["batch_size"], arguments["q_offset"], padding)
        # The layers of a model with an indexer say themselves what serves them.
        record(f"mask of sdpa: {reason}", is_missed=reason != _INDEXER)
    mask: torch.Tensor | None = sdpa_mask(**arguments)
    return mask


def is_bounds(mask: torch.Tensor | None) -> bool:
    """Return whether a mask has bounds; anything that a model derives from them has other axes."""
    return mask is not None and mask.dtype == torch.int32 and tuple(mask.shape[1:3]) == (1, 1)


def top_k_of(mask: torch.Tensor, batch: int, tokens: int, top_k: int) -> TopK:
    """Return what all layers of a step have in common, which have one mask.

    Parameters
    ----------
    mask : torch.Tensor
        bool ``[batch or 1, 1, 1, tokens]``, of ``sdpa``.
    batch, tokens : int
        Of the cache.
    top_k : int
        Tokens that an indexer chooses for each sequence.
    """
    if torch.compiler.is_compiling() or mask.is_inference() or is_capturing(mask):
        return _top_k_of(mask, batch, tokens, top_k)  # without a count of writes, or for one graph
    key = batch, tokens, top_k, mask._version  # noqa: SLF001
    known: tuple[tuple[int, ...], TopK] | None = mask.__dict__.get(_TOP_K)
    if known is None or known[0] != key:  # a mask that every step writes keeps the last one alone
        known = mask.__dict__[_TOP_K] = key, _top_k_of(mask, batch, tokens, top_k)
    return known[1]


def _top_k_of(mask: torch.Tensor, batch: int, tokens: int, top_k: int) -> TopK:
    rows = torch.arange(0, batch * tokens, tokens, dtype=torch.int32, device=mask.device)
    count = mask.expand(batch, 1, 1, -1).sum(-1, dtype=torch.int32).clamp(max=top_k)
    bounds = torch.stack([torch.zeros_like(count), count], dim=-1)
    return TopK(rows[:, None, None], bounds)


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
    config: Any = None,
    **_: Any,
) -> str:
    """Return why a step of one query token has no bounds, empty if it has."""
    rules = (
        (kv_offset == 0 and mask_function is causal_mask_function, "not causal, or a window"),
        (getattr(config, "index_topk", None) is None, _INDEXER),
        (kv_length >= _MIN_TOKENS, f"a cache of fewer than {_MIN_TOKENS} tokens"),
    )
    for is_met, reason in rules:
        if not is_met:
            return reason
    if not isinstance(q_offset, torch.Tensor):  # a static layer counts its tokens on the device
        return "the cache has no fixed length"
    return ""


def _padding_of(
    attention_mask: torch.Tensor, q_offset: torch.Tensor, kv_length: int
) -> tuple[str, _Padding | None]:
    """Return why padding is not served, empty if all of it is on the left; and it, if there is."""
    if torch.compiler.is_compiling() or is_capturing(attention_mask):
        return "a 2-D attention mask in compiled or captured code", None
    if bool(attention_mask.all()):
        return "", None
    width = attention_mask.shape[1]
    first = attention_mask.int().argmax(-1).int()
    # What follows the padding reaches the end, and the end is the token of this step.
    are_left = (attention_mask.sum(-1) + first == width).all() & (q_offset + 1 == width).all()
    all_left, is_before_page = torch.stack(
        [are_left, (first + PAGE_SIZE <= kv_length).all()]
    ).tolist()
    return ("", _Padding(first, is_before_page)) if all_left else ("padding that is not left", None)


def _bounds(batch_size: int, q_offset: torch.Tensor, padding: _Padding | None) -> torch.Tensor:
    ends = (q_offset + 1).int().expand(batch_size)
    if padding is None:
        columns = [torch.zeros_like(ends), ends]
    else:
        marks = [torch.ones_like(ends)] * (2 if padding.is_before_page else 1)
        columns = [padding.first, ends - padding.first, *marks]
    return torch.stack(columns, dim=-1)[:, None, None]
