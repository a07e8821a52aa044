"""Lengths of sparse top-k indices, for calls whose ``seq_lens`` are not sequence lengths."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.families.common.arguments import (
    INT32_MAX,
    reject,
    require,
    require_dims,
    require_dtype,
    require_ints,
    require_tensor,
    require_whole_number,
)


def default_seq_lens(
    query: torch.Tensor,
    seq_lens: torch.Tensor | None,
    sparse_mla_top_k: object,
    cum_seq_lens_q: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``seq_lens``, or if None lengths with which query tokens use all top-k indices.

    Raises
    ------
    ArgumentError
        If ``seq_lens`` is None in a dense call.
    """
    if seq_lens is not None:
        return seq_lens
    top_k = require_whole_number(sparse_mla_top_k, "sparse_mla_top_k")
    if not top_k:
        reject("seq_lens", "a torch.Tensor (required without sparse_mla_top_k)", "None")
    shape = require_tensor(query, "query").shape
    require_dims(query, "query", (4,) if cum_seq_lens_q is None else (3,))
    batch, tokens = shape[0], shape[0]
    if cum_seq_lens_q is None:
        tokens *= shape[1]
    else:
        cu_seqlens_q = require_tensor(cum_seq_lens_q, "cum_seq_lens_q")
        require_dims(cu_seqlens_q, "cum_seq_lens_q", (1,))
        batch = max(0, cu_seqlens_q.shape[0] - 1)
    # Token i of a request attends to length - q_len + i + 1 tokens, and q_len <= tokens.
    max_len = min(top_k + tokens, INT32_MAX)
    return torch.full((batch,), max_len, dtype=torch.int32, device=query.device)


def topk_lengths_of(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_lens: torch.Tensor | None,
    sparse_mla_top_k: object,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``seq_lens`` and ``sparse_mla_top_k_lens`` of a call with backend ``sparse``.

    Its ``seq_lens`` are top-k lengths: ``[batch, q_len]`` or ``[batch * q_len]``. None, and
    ``[batch]`` with several query tokens, mean all indices.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule of that backend; all ``others`` must be None.
    """
    name = "with backend 'sparse'"
    for argument, value in others.items():
        require(value is None, argument, f"None {name}", "a value")
    require_whole_number(sparse_mla_top_k, "sparse_mla_top_k", min_value=1)
    require_dims(require_tensor(query, "query"), "query", (4,))
    cache = require_tensor(kv_cache, "kv_cache")
    require_dtype(cache, "kv_cache", (torch.uint8,), f"fp8_ds_mla, {name}")
    batch, q_len = query.shape[:2]
    if seq_lens is not None:
        allowed = ((batch, q_len), (batch * q_len,), (batch,))
        lengths = require_ints(seq_lens, "seq_lens", query.device, allowed, "batch, q_len")
        flat = lengths.view(-1)
        if q_len == 1:  # the sequence length acts as the top-k length
            return flat, None
        if lengths.numel() == batch * q_len:
            return flat[:batch], flat
    return default_seq_lens(query, None, sparse_mla_top_k, None), None
