"""CPU backend of grouped-query decode in PyTorch, to develop and test without a GPU.

It follows the kernels' rules for empty rows, masks and sinks, in float32, and is slow.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import torch

from mlagen.families.common.reference import (
    count_of_rank,
    query_offsets,
    softmax_with_sinks,
    without_autocast,
)
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.problem import GqaProblem, Pair, paged_caches, paged_scales
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.variant import NVFP4_BLOCK

_MAGNITUDES = torch.tensor(
    (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float32, device="cpu"
)
_E2M1 = torch.cat([_MAGNITUDES, -_MAGNITUDES])
_E4M3_MAX = 448.0


@without_autocast
def decode_gqa(args: GqaArgs, problem: GqaProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output ``[tokens, heads, head_dim_vo]``, and the LSE ``[tokens, heads]``."""
    query = args.query.reshape(problem.tokens, *args.query.shape[-2:]).float()
    caches = paged_caches(args)
    scales = paged_scales(args, caches)
    out = query.new_zeros(*query.shape[:-1], problem.out_shape[-1])
    lse = query.new_full(query.shape[:-1], -math.inf)
    if problem.variant.sparse_block:
        _decode_sparse(args, problem, query, out, lse)
    elif args.has_head_tables:
        for head in range(problem.kv_heads):
            own = slice(head * problem.group_size, (head + 1) * problem.group_size)
            parts = [
                pair and Pair(*(part[:, :, head, None] for part in pair))
                for pair in (caches, scales)
            ]
            assert args.seq_lens is not None
            assert args.block_tables is not None
            sinks = None if args.sinks is None else args.sinks.flatten()[own]
            of_head = args._replace(
                block_tables=args.block_tables[head], seq_lens=args.seq_lens[head], sinks=sinks
            )
            call = (of_head, replace(problem, kv_heads=1, heads=problem.group_size), query[:, own])
            _decode_dense(*call, parts[0] or caches, parts[1], out[:, own], lse[:, own])
    else:
        _decode_dense(args, problem, query, caches, scales, out, lse)
    return _finished(args, problem, out, lse)


def _decode_dense(
    args: GqaArgs,
    problem: GqaProblem,
    query: torch.Tensor,
    caches: Pair,
    scales: Pair | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write the attention of every query token over the tokens of its request."""
    key_scales, value_scales = scales or (None, None)
    mask = _mask_bits(args, problem)
    offsets = query_offsets(args.cum_seq_lens_q, problem.batch, problem.max_q_len)
    for index, (start, end) in enumerate(pairwise(offsets)):
        if not 0 <= start <= end <= problem.tokens:
            continue  # as in the kernels, an invalid range has no query tokens
        key_ids, value_ids = _page_ids(args, index)
        capacity = len(key_ids) * problem.variant.page_size
        assert args.seq_lens is not None
        seq_len = min(max(int(args.seq_lens.view(-1)[index]), 0), capacity)
        q_len = end - start
        keys = _gather(caches.key, key_scales, key_ids, seq_len)
        values = _gather(caches.value, value_scales, value_ids, seq_len)
        for token in range(start, end):
            draft = token - start
            positions = torch.arange(seq_len, dtype=torch.int64, device="cpu")
            if args.causal_seqlens_kv_global is not None:
                position = int(args.causal_seqlens_kv_global[index]) + draft
                positions = positions[: count_of_rank(position + 1, args.cp_world, args.cp_rank)]
            elif problem.is_causal:
                positions = _unmasked(seq_len, q_len, draft, problem.window, mask, token)
            out[token], lse[token] = _attend(
                args, problem, query[token], keys[positions], values[positions]
            )


def _finished(
    args: GqaArgs, problem: GqaProblem, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE as the call requests them."""
    if problem.variant.out_dtype is DType.E4M3:
        out = (out * args.out_e4m3_factor).clamp(-_E4M3_MAX, _E4M3_MAX)
    else:
        out = out * args.out_16bit_factor
    out, lse = out.to(problem.out_dtype), lse * (problem.lse_factor / math.log(2))
    if args.output_gate is not None:
        gates = args.output_gate.view(out.shape).float()
        out = (out.float() * torch.sigmoid(gates)).to(problem.out_dtype)
    return out, lse


def _decode_sparse(
    args: GqaArgs,
    problem: GqaProblem,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write the attention of every query token over the tokens that its indices name."""
    page_size = problem.variant.page_size
    caches = paged_caches(args)
    scales = paged_scales(args, caches)
    for token, head in product(range(problem.tokens), range(problem.kv_heads)):
        rows = slice(head * problem.group_size, (head + 1) * problem.group_size)
        if args.block_tables is None:
            pairs = _cached_tokens(args, problem, token)
            tokens = [(of // page_size, of % page_size, head) for of in pairs]
        else:
            tokens = [_sparse_tokens(args, problem, token, head)] * 2
        keys, values = (
            _dequantized(_stored(cache, at), _stored(scales[part], at) if scales else None)
            for part, (cache, at) in enumerate(zip(caches, tokens, strict=True))
        )
        out[token, rows], lse[token, rows] = _attend(
            args, problem, query[token, rows], keys[:, None], values[:, None]
        )


def _sparse_tokens(
    args: GqaArgs, problem: GqaProblem, token: int, head: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return pages and slots of the tokens that the indices of a query token and KV head name."""
    page_size = problem.variant.page_size
    request, draft = divmod(token, max(problem.q_len, 1))
    if args.token_to_req is not None:
        request = int(args.token_to_req.view(torch.int32)[token])
    end = problem.max_pages * page_size
    if not 0 <= request < problem.batch:
        request, end = 0, 0
    elif args.seq_lens is not None:
        end = min(max(int(args.seq_lens.view(-1)[request]), 0), end)
    if problem.is_causal:
        end = min(end, end - problem.q_len + draft + 1)
    positions = _sparse_positions(args, problem, token, head)
    positions = positions[positions < end]
    if len(positions) == 0:
        return positions, positions, head
    assert args.block_tables is not None
    pages = args.block_tables.view(torch.int32)[request].long()[positions // page_size]
    exists = (pages >= 0) & (pages < problem.num_pages)
    return pages[exists], positions[exists] % page_size, head


def _cached_tokens(args: GqaArgs, problem: GqaProblem, token: int) -> torch.Tensor:
    """Return the tokens of the cache that the top-k indices name, of keys and of values."""
    assert args.block_indices is not None
    assert args.seq_lens is not None
    count = min(max(int(args.seq_lens.view(-1)[token]), 0), problem.num_indices)
    both = args.block_indices.view(torch.int32)[token, :, :count].long()
    capacity = problem.num_pages * problem.variant.page_size
    return both[:, ((both >= 0) & (both < capacity)).all(dim=0)]


def _sparse_positions(args: GqaArgs, problem: GqaProblem, token: int, head: int) -> torch.Tensor:
    """Return the positions that the block indices of a query token and KV head name, in order."""
    assert args.block_indices is not None
    indices = args.block_indices.view(torch.int32)
    indices = indices[head, token] if indices.dim() == 3 else indices[token]
    count = int(indices[-1]) if args.has_index_counts else problem.num_indices
    indices = indices[: min(max(count, 0), problem.num_indices)].long()
    block = problem.variant.sparse_block
    in_block = torch.arange(block, dtype=torch.int64, device="cpu")
    return (indices[indices >= 0][:, None] * block + in_block).flatten()


def _mask_bits(args: GqaArgs, problem: GqaProblem) -> torch.Tensor | None:
    """Return the drafts visible to each query token, as bools ``[tokens, 32 * mask_words]``."""
    if args.mask is None or not problem.mask_words:
        return None
    rows = args.mask.flatten(0, -2).view(torch.uint8)
    bits = rows[:, :, None] >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1
    return bits.bool().flatten(1)


def _unmasked(
    seq_len: int, q_len: int, draft: int, window: int, mask: torch.Tensor | None, token: int
) -> torch.Tensor:
    """Return the KV positions that draft ``draft``, query token ``token``, attends to."""
    first_draft = seq_len - q_len
    position = torch.arange(seq_len, dtype=torch.int64, device="cpu")
    if mask is None:
        is_unmasked = position <= first_draft + draft
    else:
        other = position - first_draft
        bits = mask[token][other.clamp(0, mask.shape[1] - 1)] & (other < mask.shape[1])
        is_unmasked = (other < 0) | bits
    is_unmasked &= position >= first_draft + draft + 1 - window
    return is_unmasked.nonzero()[:, 0]


def _page_ids(args: GqaArgs, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the page ids of keys and of values."""
    assert args.block_tables is not None
    if args.kv_indptr is None:
        tables = args.block_tables[index]
        return (tables[0], tables[1]) if args.separate_page_ids else (tables, tables)
    start, end = (max(0, int(args.kv_indptr[index + i])) for i in range(2))
    return args.block_tables[start:end], args.block_tables[start:end]


def _gather(
    cache: torch.Tensor, scales: torch.Tensor | None, page_ids: torch.Tensor, seq_len: int
) -> torch.Tensor:
    """Return the first ``seq_len`` tokens of a request; an invalid page reads as zeros."""
    num_pages, page_size = cache.shape[:2]
    used_pages = -(-seq_len // page_size)
    ids = page_ids[:used_pages].view(torch.int32).long()
    is_valid = (ids >= 0) & (ids < num_pages)
    stored = _stored(cache, ids[is_valid])
    pages = _dequantized(stored, _stored(scales, ids[is_valid]) if scales is not None else None)
    rows = torch.zeros(used_pages, *pages.shape[1:], dtype=torch.float32, device="cpu")
    rows[is_valid] = pages
    return rows.flatten(0, 1)[:seq_len]


def _stored(cache: torch.Tensor, at: Any) -> torch.Tensor:
    # One-byte elements as uint8: torch before 2.9 does not index e4m3 on the CPU.
    return cache.view(torch.uint8)[at].view(cache.dtype) if cache.itemsize == 1 else cache[at]


def _dequantized(stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    if scales is None:
        return stored.float()
    if scales.dtype is torch.float32:  # of each token and KV head
        return stored.float() * scales[..., None]
    nibbles = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2).long()
    factors = scales.contiguous().view(torch.float8_e4m3fn).float()
    return _E2M1[nibbles] * factors.repeat_interleave(NVFP4_BLOCK, dim=-1)


def _attend(
    args: GqaArgs,
    problem: GqaProblem,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention ``[heads, head_dim_vo]`` of one query token over its unmasked tokens.

    The LSE ``[heads]`` is natural.
    """
    bmm2_scale = float(args.bmm2_scale) if problem.takes_bmm2 else 1.0
    score_scale = float(args.bmm1_scale) * problem.score_factor
    if problem.bmm2_scales_scores:
        score_scale *= bmm2_scale
    by_kv_head = query.view(-1, problem.group_size, query.shape[-1])
    scores = by_kv_head @ keys.permute(1, 2, 0) * score_scale
    if problem.soft_cap:
        scores = problem.soft_cap * torch.tanh(scores / problem.soft_cap)
    sinks = args.sinks
    if sinks is not None:
        sinks = sinks.view(problem.kv_heads, problem.group_size)  # of a dense call
    weights, lse = softmax_with_sinks(scores, sinks)
    out = (weights @ values.transpose(0, 1)).view(len(query), -1) * bmm2_scale
    if len(keys) == 0:
        out = torch.zeros_like(out)
    return out, lse.flatten()
