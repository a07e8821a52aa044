"""The attention function ``mlagen``: GQA over a static cache, MLA over latents, else sdpa."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mlagen.decode import xqa_batch_decode_with_kv_cache
from mlagen.errors import UnsupportedError
from mlagen.integrations.transformers.latent import expanded, is_absorbed, latent_step
from mlagen.integrations.transformers.steps import (
    bool_mask,
    is_bounds,
    pages_of,
    record,
    workspace_of,
)

_INDEXER = "the tokens of an indexer, without use_mla"
_DTYPES = (torch.bfloat16, torch.float16)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as ``sdpa`` does, by a kernel where there is one.

    ``query`` is ``[batch, heads, q_len, head_dim]``; ``key`` and ``value`` are ``[batch, kv_heads,
    tokens, head_dim]``, a static cache whole, or of an absorbed MLA layer its latents and RoPE
    keys; ``attention_mask`` is that of :func:`mlagen.integrations.transformers.steps.decode_mask`,
    or one of ``sdpa``. Returns ``[batch, q_len, heads, head_dim]``, and no attention weights.
    Raises UnsupportedError if the layer has attention sinks, which sdpa would ignore in prompts, or
    a soft cap and a position bias.
    """
    if kwargs.get("s_aux") is not None:
        raise UnsupportedError("s_aux: expected None (no attention sinks), got a tensor")
    softcap = kwargs.get("softcap")
    if softcap is not None and kwargs.get("position_bias") is not None:
        raise UnsupportedError("position_bias: expected None with a softcap, got a tensor")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if is_absorbed(module):
        out = latent_step(module, query, key, value, attention_mask, scaling, kwargs.get("indices"))
        if out is not None:
            return out, None
        key, value = expanded(module, key, value)
        reason = "latents" if query.shape[2] == 1 else "more than one query token"
    else:
        reason = _unserved(query, key, value, attention_mask, dropout, kwargs)
    if reason:
        # A step without bounds is in the record already, with the reason of its mask.
        has_other_reason = is_bounds(attention_mask) or reason == _INDEXER
        by = "sdpa" if softcap is None else "eager, for its soft cap"
        record(f"{by}: {reason}", is_missed=query.shape[2] == 1 and has_other_reason)
        mask = _sdpa_mask(attention_mask, key.shape[2], kwargs.pop("indices", None))
        if softcap is not None:
            return _attend_capped(module, query, key, value, mask, scaling, dropout, softcap), None
        kwargs |= {"scaling": scaling, "dropout": dropout}
        attended: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, mask, **kwargs
        )
        return attended
    return _attend(query, key, value, attention_mask, scaling, softcap), None


def _unserved(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> str:
    """Return why no kernel serves a call, empty if one does."""
    _, _, q_len, head_dim = query.shape
    dtype = query.dtype
    is_served_dim = head_dim == 512 or (head_dim <= 256 and head_dim % 16 == 0)
    are_contiguous = key.is_contiguous() and value.is_contiguous()
    has_bias = kwargs.get("position_bias") is not None
    rules = (
        (q_len == 1, "more than one query token"),
        (kwargs.get("indices") is None, _INDEXER),
        (is_bounds(mask), "a mask of sdpa"),
        (dtype in _DTYPES and key.dtype == value.dtype == dtype, "dtype {dtype}"),
        (key.shape[-1] == value.shape[-1] == head_dim, "head dims of keys and values differ"),
        (is_served_dim, "head dim {head_dim}"),
        (are_contiguous, "a cache that is not contiguous"),
        (not dropout and not has_bias, "dropout or a position bias"),
    )
    for is_met, reason in rules:
        if not is_met:
            return reason.format(dtype=dtype, head_dim=head_dim)
    return ""


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return ``[batch, 1, heads, head_dim]`` of one query token, over the cache in place."""
    assert bounds is not None
    batch, heads, _, head_dim = query.shape
    kv_heads, tokens = key.shape[1:3]
    pages = pages_of(bounds, tokens, kv_heads)
    record(f"mlagen GQA, {pages.described}")
    out = xqa_batch_decode_with_kv_cache(
        query.reshape(batch * kv_heads, heads // kv_heads, head_dim),
        (pages.of(key), pages.of(value)),
        workspace_of(query),
        pages.block_tables,
        pages.seq_lens,
        tokens,
        bmm1_scale=scaling,
        kv_layout="HND",
        logits_soft_cap=softcap,
    )
    assert isinstance(out, torch.Tensor)
    return out.view(batch, 1, heads, head_dim)


def _attend_capped(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    dropout: float,
    softcap: float,
) -> torch.Tensor:
    """Attend as ``eager`` does, with a mask of sdpa, which has no soft cap."""
    batch, heads, q_len, _ = query.shape
    kv_heads, tokens = key.shape[1:3]
    grouped = query.reshape(batch, kv_heads, -1, query.shape[-1])  # query heads, then tokens
    scores = (grouped @ key.mT * (scaling / softcap)).tanh() * softcap
    scores = scores.view(batch, heads, q_len, tokens).float()
    if mask is None and q_len > 1:
        mask = torch.ones(q_len, tokens, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask
    weights = scores.softmax(-1).nan_to_num().to(query.dtype)  # of a row without tokens zeros
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    out = weights.view(batch, kv_heads, -1, tokens) @ value
    return out.view(batch, heads, q_len, -1).transpose(1, 2).contiguous()


def _sdpa_mask(
    mask: torch.Tensor | None, tokens: int, indices: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the mask for sdpa: bounds as bools, and with an indexer only its top-k tokens."""
    if mask is not None and is_bounds(mask):
        mask = bool_mask(mask, tokens)
    if indices is None:
        return mask
    chosen = torch.zeros(
        (*indices.shape[:2], tokens), dtype=torch.bool, device=indices.device
    ).scatter_(-1, indices.long(), value=True)[:, None]
    if mask is None:
        return chosen
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)
