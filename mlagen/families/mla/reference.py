"""CPU backend of MLA decode in PyTorch, to develop and test without a GPU.

It follows the kernels' rules for empty rows, masks, sinks and LSE, in float32 on dequantized
rows, and is slow.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from mlagen.families.common.reference import (
    count_of_rank,
    dequantized,
    elements_of,
    query_offsets,
    scaled_groups,
    softmax_with_sinks,
    stored_rows,
    without_autocast,
)
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.problem import MlaProblem, pages_of
from mlagen.families.mla.two_pools import TopkList, check_lists
from mlagen.families.mla.write_rows import places_of, slots_of


@without_autocast
def decode_mla(args: MlaArgs, problem: MlaProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output ``[tokens, heads, kv_lora_rank]`` and the LSE ``[tokens, heads]``."""
    query = _dequantized_query(args, problem)
    out = query.new_zeros(problem.tokens, problem.heads, problem.variant.kv_lora_rank)
    lse = query.new_full((problem.tokens, problem.heads), -math.inf)
    log_base = 1.0 if args.return_lse_base == "basee" else math.log(2)
    if args.kv_cache_format is not None:
        lists = check_lists(args, problem.tokens)
        for token in range(problem.tokens):
            rows = torch.cat([_pool_rows(each, token, query.shape[-1]) for each in lists])
            out[token], lse[token] = _attend(args, query[token], rows, rows, None)
        return out.to(problem.out_dtype), lse / log_base
    is_causal = args.is_causal or problem.top_k > 0
    assert args.seq_lens is not None
    offsets = query_offsets(args.cum_seq_lens_q, problem.batch, problem.q_len)
    for index, (start, end) in enumerate(pairwise(offsets)):
        if not 0 <= start <= end <= problem.tokens:
            continue  # as in the kernels, an invalid range has no query tokens
        seq_len = max(int(args.seq_lens[index]), 0)
        if problem.top_k == 0:
            keys, values = _request_rows(args, problem, index, seq_len)
            seq_len = len(keys)
        for token in range(start, end):
            kv_end = seq_len
            if args.causal_seqlens_kv_global is not None:
                position = int(args.causal_seqlens_kv_global[index]) - (end - token)
                kv_end = min(seq_len, count_of_rank(position + 1, args.cp_world, args.cp_rank))
            elif is_causal:
                kv_end = max(0, seq_len - (end - token) + 1)
            if problem.top_k:
                keys, values = _topk_rows(args, problem, token, kv_end)
                kv_end = len(keys)
            bias = args.bias[token, :, :kv_end] if args.bias is not None else None
            out[token], lse[token] = _attend(
                args, query[token], keys[:kv_end], values[:kv_end], bias
            )
    return out.to(problem.out_dtype), lse / log_base


def _dequantized_query(args: MlaArgs, problem: MlaProblem) -> torch.Tensor:
    """Return the query ``[tokens, heads, head_dim_qk]``, scaled."""
    parts = [args.query] if args.query_rope is None else [args.query, args.query_rope]
    rows = [part.reshape(problem.tokens, problem.heads, part.shape[-1]) for part in parts]
    dtype = problem.variant.query_dtype
    query = torch.cat(
        [dequantized(row.contiguous().view(torch.uint8), dtype) for row in rows], dim=-1
    )
    if args.query_scales is not None:
        query *= args.query_scales[:, None, None]
    return query


def _request_rows(
    args: MlaArgs, problem: MlaProblem, index: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the tokens of a request, up to the capacity of its table."""
    tables = args.block_tables
    if args.kv_indptr is not None:
        start, end = (int(args.kv_indptr[index + i]) for i in range(2))
        pages = tables[max(0, start) : max(0, end)].long()
    else:
        pages = (tables if tables.dim() == 2 else tables[:, 0])[index].long()
    count = min(seq_len, len(pages) * problem.variant.page_size)
    positions = torch.arange(count, dtype=torch.int64, device="cpu")
    columns = positions // problem.variant.page_size
    slots = positions % problem.variant.page_size
    keys = _rows(args, problem, pages[columns], slots)
    if args.value_cache is None:
        return keys, keys[:, : problem.variant.kv_lora_rank]
    if tables.dim() == 3:
        pages = tables[index, 1].long()
    values = _rows(args._replace(kv_cache=args.value_cache), problem, pages[columns], slots)
    return keys, values[:, : problem.variant.kv_lora_rank]


def _topk_rows(
    args: MlaArgs, problem: MlaProblem, token: int, topk_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values at a query token's valid top-k indices; duplicates count."""
    if args.top_k_lens is not None:
        topk_length = max(0, int(args.top_k_lens[token]))
    indices = args.block_tables.reshape(problem.tokens, problem.top_k)[token, :topk_length].long()
    page_size = problem.variant.page_size
    indices = indices[(indices >= 0) & (indices < problem.num_pages * page_size)]
    keys = _rows(args, problem, indices // page_size, indices % page_size)
    return keys, keys[:, : problem.variant.kv_lora_rank]


def _pool_rows(topk: TopkList, token: int, elements: int) -> torch.Tensor:
    """Return the tokens ``[n, d]`` at the valid indices of a query token, duplicates included."""
    length = min(max(0, int(topk.lens[token])), topk.top_k)
    slots = slots_of(topk.indices[token, :length], topk.pool)
    slots = slots[slots >= 0]
    page_size = topk.pool.cache.shape[1]
    places = places_of(topk.pool, topk.row, elements)
    parts = [place[slots // page_size, slots % page_size] for place in places]
    return elements_of(topk.row, *parts)


def _rows(
    args: MlaArgs, problem: MlaProblem, pages: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Return tokens ``[n, head_dim_qk]`` of the cache; zeros for an invalid page."""
    variant = problem.variant
    width = variant.kv_lora_rank + variant.qk_rope_head_dim
    rows = torch.zeros(len(pages), width, dtype=torch.float32, device="cpu")
    is_valid = (pages >= 0) & (pages < problem.num_pages)
    pages, slots = pages[is_valid], slots[is_valid]
    stored = stored_rows(pages_of(args.kv_cache), pages, slots)
    row_bytes = variant.kv_dtype.row_bytes(width)  # others may be reserved
    latent = dequantized(stored[:, :row_bytes], variant.kv_dtype)
    rope = latent[:, variant.kv_lora_rank :]
    latent = latent[:, : variant.kv_lora_rank]
    if args.rope_cache is not None:
        stored = stored_rows(pages_of(args.rope_cache), pages, slots)
        rope = dequantized(stored, variant.kv_dtype)
    row = variant.kv_dtype.row
    if args.kv_scales is not None and row is not None:
        scales = args.kv_scales[pages, slots].reshape(len(pages), row.scales)
        latent = scaled_groups(latent, scales, row.group)
        rope = rope * scales[:, :1] if row.scales_bf16 else rope
    elif args.kv_scales is not None:
        latent = scaled_groups(latent, args.kv_scales[pages, slots])
        rope = rope * args.rope_scale
    else:
        latent, rope = latent * args.latent_scale, rope * args.rope_scale
    rows[is_valid] = torch.cat([latent, rope], dim=1)
    return rows


def _attend(
    args: MlaArgs,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of one query token ``[heads, head_dim_qk]``, and its natural LSE."""
    factor = float(args.bmm1_scale)
    if args.bmm2_scales_scores:
        factor *= float(args.bmm2_scale)
    scores = query @ keys.T * factor
    is_masked = None
    if bias is not None:
        is_masked = (bias == -math.inf).expand_as(scores)
        scores = torch.where(is_masked, -math.inf, scores + bias)  # a masked key may be NaN
    is_fully_masked = (scores == -math.inf).all(dim=1)
    weights, lse = softmax_with_sinks(scores, args.sinks)
    out = _weighted(weights, values, is_masked) * float(args.bmm2_scale)
    return torch.where(is_fully_masked[:, None], 0.0, out), lse


def _weighted(
    weights: torch.Tensor, values: torch.Tensor, is_masked: torch.Tensor | None
) -> torch.Tensor:
    """Return ``weights @ values``, without NaN or Inf from masked values."""
    is_nonfinite = ~values.isfinite().all(dim=1)
    if is_masked is None or not bool(is_nonfinite.any()):
        return weights @ values
    finite = torch.where(is_nonfinite[:, None], 0.0, values)
    rest = weights[:, is_nonfinite, None] * values[is_nonfinite]
    return weights @ finite + torch.where(is_masked[:, is_nonfinite, None], 0.0, rest).sum(dim=1)
