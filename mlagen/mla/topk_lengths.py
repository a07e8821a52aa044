"""Lengths of sparse top-k indices, where ``seq_lens`` does not give them."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.api.arguments import (
    INT32_MAX,
    reject,
    require,
    require_dims,
    require_dtype,
    require_ints,
    require_tensor,
    require_whole_number,
)


def plain_lengths(
    query: torch.Tensor,
    seq_lens: torch.Tensor | None,
    sparse_mla_top_k: object,
    cum_seq_lens_q: torch.Tensor | None,
) -> torch.Tensor:
    """Return lengths by which every query token looks at all of its list, if none are given.

    Raises
    ------
    ArgumentError
        If none are given without lists.
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
        ends = require_tensor(cum_seq_lens_q, "cum_seq_lens_q")
        require_dims(ends, "cum_seq_lens_q", (1,))
        batch = max(0, ends.shape[0] - 1)
    # A token sees ``length - q_len + its place + 1``, and no request has more than all tokens.
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

    Its ``seq_lens`` are the lengths of the lists: ``[batch, q_len]`` or ``[batch * q_len]``. None,
    and ``[batch]`` where there are several query tokens, stand for all columns.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule of that backend; of ``others`` none may be given.
    """
    name = "with backend 'sparse'"
    for argument, value in others.items():
        require(value is None, argument, f"None {name}", "a value")
    require_whole_number(sparse_mla_top_k, "sparse_mla_top_k", least=1)
    require_dims(require_tensor(query, "query"), "query", (4,))
    cache = require_tensor(kv_cache, "kv_cache")
    require_dtype(cache, "kv_cache", (torch.uint8,), f"packed rows, {name}")
    batch, q_len = query.shape[:2]
    if seq_lens is not None:
        allowed = ((batch, q_len), (batch * q_len,), (batch,))
        lengths = require_ints(seq_lens, "seq_lens", query.device, allowed, "batch, q_len")
        flat = lengths.view(-1)
        if q_len == 1:  # what the token may see of its list is what the list has
            return flat, None
        if lengths.numel() == batch * q_len:
            return flat[:batch], flat
    return plain_lengths(query, None, sparse_mla_top_k, None), None
