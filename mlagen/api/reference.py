"""The CPU backend: the same functions in plain torch, to develop and test without a GPU.

It follows the kernels' rules for empty rows, masks, sinks and LSE, in float32 on decoded rows. It
is slow.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from mlagen.api.mla_cache import pages_of
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_request import MlaRequest
from mlagen.api.rows import (
    decoded,
    query_ends,
    scaled_groups,
    softmax_with_sinks,
    stored_rows,
)
from mlagen.spec.dtype import DType


def decode_mla(inputs: MlaInputs, request: MlaRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output ``[tokens, heads, kv_lora_rank]`` and the LSE ``[tokens, heads]``."""
    query = _decoded_query(inputs, request)
    out = torch.zeros(request.tokens, request.heads, request.variant.kv_lora_rank)
    lse = torch.full((request.tokens, request.heads), -math.inf)
    is_causal = inputs.is_causal or request.top_k > 0
    ends = query_ends(inputs.cum_seq_lens_q, request.batch, request.q_len)
    for index, (start, end) in enumerate(pairwise(ends)):
        if not 0 <= start <= end <= request.tokens:  # nobody's tokens
            continue
        seq_len = max(int(inputs.seq_lens[index]), 0)
        if request.top_k == 0:
            keys, values = _request_rows(inputs, request, index, seq_len)
            seq_len = len(keys)
        for token in range(start, end):
            visible = max(0, seq_len - (end - token) + 1) if is_causal else seq_len
            if request.top_k:
                keys, values = _listed_rows(inputs, request, token, visible)
                visible = len(keys)
            bias = inputs.bias[token, :, :visible] if inputs.bias is not None else None
            out[token], lse[token] = _attend(
                inputs, query[token], keys[:visible], values[:visible], bias
            )
    unit = 1.0 if inputs.return_lse_base == "basee" else math.log(2)
    return out.to(request.out_dtype), lse / unit


def _decoded_query(inputs: MlaInputs, request: MlaRequest) -> torch.Tensor:
    """Return the query ``[tokens, heads, head_dim_qk]``, scaled."""
    parts = [inputs.query] if inputs.query_rope is None else [inputs.query, inputs.query_rope]
    rows = [part.reshape(request.tokens, request.heads, part.shape[-1]) for part in parts]
    dtype = request.variant.query_dtype
    query = torch.cat([decoded(row.contiguous().view(torch.uint8), dtype) for row in rows], dim=-1)
    if inputs.query_scales is not None:
        query *= inputs.query_scales[:, None, None]
    return query


def _request_rows(
    inputs: MlaInputs, request: MlaRequest, index: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the tokens of a request, as many as its table can hold."""
    tables = inputs.block_tables
    if inputs.table_starts is not None:
        start, end = (int(inputs.table_starts[index + i]) for i in range(2))
        pages = tables[max(0, start) : max(0, end)].long()
    else:
        pages = (tables if tables.dim() == 2 else tables[:, 0])[index].long()
    positions = torch.arange(min(seq_len, len(pages) * request.variant.page_size))
    columns = positions // request.variant.page_size
    slots = positions % request.variant.page_size
    keys = _rows(inputs, request, pages[columns], slots)
    if inputs.value_cache is None:
        return keys, keys[:, : request.variant.kv_lora_rank]
    if tables.dim() == 3:
        pages = tables[index, 1].long()
    values = _rows(inputs._replace(kv_cache=inputs.value_cache), request, pages[columns], slots)
    return keys, values[:, : request.variant.kv_lora_rank]


def _listed_rows(
    inputs: MlaInputs, request: MlaRequest, token: int, visible: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the tokens that a query token lists, each as often as listed."""
    if inputs.top_k_lens is not None:
        visible = max(0, int(inputs.top_k_lens[token]))
    listed = inputs.block_tables.reshape(request.tokens, request.top_k)[token, :visible].long()
    page_size = request.variant.page_size
    listed = listed[(listed >= 0) & (listed < request.num_pages * page_size)]
    keys = _rows(inputs, request, listed // page_size, listed % page_size)
    return keys, keys[:, : request.variant.kv_lora_rank]


def _rows(
    inputs: MlaInputs, request: MlaRequest, pages: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Return tokens ``[n, head_dim_qk]`` of the cache; of a page that is none, zeros."""
    variant = request.variant
    rows = torch.zeros(len(pages), variant.kv_lora_rank + variant.qk_rope_head_dim)
    exists = (pages >= 0) & (pages < request.num_pages)
    pages, slots = pages[exists], slots[exists]
    latent = decoded(stored_rows(pages_of(inputs.kv_cache), pages, slots), variant.kv_dtype)
    rope = latent[:, variant.kv_lora_rank :]
    latent = latent[:, : variant.kv_lora_rank]
    if inputs.rope_cache is not None:
        stored = stored_rows(pages_of(inputs.rope_cache), pages, slots)
        rope = decoded(stored, variant.kv_dtype)
    if inputs.kv_scales is not None and variant.kv_dtype is DType.PACKED640:
        scales = inputs.kv_scales[pages, slots][:, None]
        latent, rope = latent * scales, rope * scales
    elif inputs.kv_scales is not None:
        latent = scaled_groups(latent, inputs.kv_scales[pages, slots])
        rope = rope * inputs.rope_scale
    else:
        latent, rope = latent * inputs.latent_scale, rope * inputs.rope_scale
    rows[exists] = torch.cat([latent, rope], dim=1)
    return rows


def _attend(
    inputs: MlaInputs,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with one query token ``[heads, head_dim_qk]``; the LSE is natural."""
    factor = float(inputs.bmm1_scale)
    if inputs.scores_take_bmm2:
        factor *= float(inputs.bmm2_scale)
    scores = query @ keys.T * factor
    hidden = None
    if bias is not None:
        hidden = (bias == -math.inf).expand_as(scores)
        scores = torch.where(hidden, -math.inf, scores + bias)  # a hidden key may be NaN
    sees_nothing = (scores == -math.inf).all(dim=1)
    weights, lse = softmax_with_sinks(scores, inputs.sinks)
    out = _weighted(weights, values, hidden) * float(inputs.bmm2_scale)
    return torch.where(sees_nothing[:, None], 0.0, out), lse


def _weighted(
    weights: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor | None
) -> torch.Tensor:
    """Return ``weights @ values``, to which a hidden value adds nothing, not even NaN."""
    is_bad = ~values.isfinite().all(dim=1)
    if hidden is None or not bool(is_bad.any()):
        return weights @ values
    finite = torch.where(is_bad[:, None], 0.0, values)
    bad = weights[:, is_bad, None] * values[is_bad]
    return weights @ finite + torch.where(hidden[:, is_bad, None], 0.0, bad).sum(dim=1)
