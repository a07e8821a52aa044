"""Tensors of MLA decode problems, of one rank too, with poison in what must not be read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.problems.masks import MASKS
from tests.problems.mla import MlaCase, MlaProblem, VisibleTokens
from tests.problems.mla_rows import Stored, format_of, row_bytes, store, viewed
from tests.problems.problem import INVALID_IDS, POISON

# Scales of an e4m3 cache under a 16-bit query; neither powers of two nor bf16 numbers.
LATENT_SCALE, ROPE_SCALE = 0.0371, 0.0543


@dataclass(frozen=True, kw_only=True)
class _Cache:
    """A cache with content in random pages, and poison elsewhere."""

    rows: torch.Tensor  # [pages, page_size, row bytes]
    scales: torch.Tensor | None
    pages: list[torch.Tensor]  # of each sequence, in order
    stored: list[Stored]  # the tokens of each sequence, in order

    def slots_of(self, seq: int, page_size: int) -> torch.Tensor:
        """Return the physical index of every token of a sequence."""
        return _slots(self.pages[seq], len(self.stored[seq].rows), page_size)


def _slots(pages: torch.Tensor, length: int, page_size: int) -> torch.Tensor:
    positions = torch.arange(length)
    return pages[positions // page_size] * page_size + positions % page_size


@dataclass(frozen=True, kw_only=True)
class _Query:
    """Query tokens ``[tokens, heads, width]`` as stored, and their float64 values."""

    given: torch.Tensor
    elements: torch.Tensor
    scales: torch.Tensor  # [tokens]


def build(case: MlaCase, device: str) -> MlaProblem:
    """Return the problem on ``device``."""
    generator = torch.Generator().manual_seed(case.seed)
    kv_format = case.kv_format or format_of(case.dtype)
    caches = _caches(case, kv_format, generator)
    query = _query(case, generator)
    sinks = torch.randn(case.heads, generator=generator) * 3 if case.with_sinks else None
    bias = _bias(case, generator)
    indices, top_k_lens, chosen = _topk_indices(case, caches[0], generator)
    tables, kv_indptr = _tables(case, caches)
    extra_args: dict[str, Any] = {
        "is_causal": case.is_causal,
        "bmm2_scales_scores": case.bmm2_scales_scores,
        "bias": bias,
        "kv_indptr": kv_indptr,
        **_scale_fields(case, caches[0], query),
    }
    rows, rank = caches[0].rows, case.kv_lora_rank
    if case.values == "other cache":
        extra_args["value_cache"] = _in_layout(
            caches[1].rows.to(device), case.cache_layout, kv_format
        )
    given_query = query.given
    if case.separate_rope:
        split = rows.shape[2] * rank // (rank + case.qk_rope_head_dim)
        extra_args["rope_cache"] = _in_layout(rows[..., split:].to(device), "strided", kv_format)
        rows = rows[..., :split].contiguous()
        extra_args["query_rope"] = _uniform(case, given_query[..., rank:].contiguous())
        given_query = given_query[..., :rank].contiguous()
    ends = torch.tensor((0, *case.lens)).cumsum(0).to(torch.int32).to(device)
    return MlaProblem(
        case=case,
        query=_uniform(case, given_query).to(device),
        kv_cache=_in_layout(rows.to(device), case.cache_layout, kv_format),
        block_tables=(_uniform(case, indices) if case.top_k else tables).to(device),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32).to(device),
        sinks=sinks.to(device) if sinks is not None else None,
        cum_seq_lens_q=ends if case.q_lens is not None else None,
        top_k_lens=top_k_lens.to(device) if case.with_top_k_lens else None,
        visible=_visible_tokens(case, caches, query, bias, chosen),
        extra_args={
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in extra_args.items()
        },
    )


def _uniform(case: MlaCase, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[tokens, ...]`` as ``[batch, q_len, ...]`` unless queries are ragged."""
    if case.q_lens is not None:
        return tensor
    return tensor.view(len(case.seq_lens), case.q_len, *tensor.shape[1:])


def _scale_fields(case: MlaCase, cache: _Cache, query: _Query) -> dict[str, Any]:
    if case.kv_format == "fp8_per_token":
        return {"is_fp8_per_token": True, "query_scales": query.scales, "kv_scales": cache.scales}
    if case.scales == "two":
        return {"latent_scale": LATENT_SCALE, "rope_scale": ROPE_SCALE}
    return {"kv_scales": cache.scales, "rope_scale": ROPE_SCALE} if case.scales else {}


def _visible_tokens(
    case: MlaCase,
    caches: list[_Cache],
    query: _Query,
    bias: torch.Tensor | None,
    chosen: list[torch.Tensor],
) -> list[VisibleTokens]:
    tokens = []
    for token, (seq, position, visible) in enumerate(_placed(case)):
        order, counts = torch.arange(visible), torch.ones(visible)
        own = bias[token, :, :visible].double() if bias is not None else None
        if case.mask:
            own = MASKS[case.mask].bias(seq, case.heads, position, order)
        if case.top_k:
            order, counts = torch.unique(chosen[token], return_counts=True)
        tokens.append(
            VisibleTokens(
                query=query.elements[token],
                keys=caches[0].stored[seq].elements[order],
                values=caches[-1].stored[seq].elements[order, : case.kv_lora_rank],
                counts=counts.double(),
                bias=own,
            )
        )
    return tokens


def _placed(case: MlaCase) -> list[tuple[int, int, int]]:
    """Return sequence and position of every query token, and how many tokens it may attend to."""
    return [
        (seq, length - q_len + index, max(0, length - (q_len - 1 - index) * case.is_causal))
        for seq, (length, q_len) in enumerate(zip(case.seq_lens, case.lens, strict=True))
        for index in range(q_len)
    ]


def _caches(case: MlaCase, kv_format: str, generator: torch.Generator) -> list[_Cache]:
    """Return the cache of keys, and that of values if separate."""
    used = sum(case.page_counts)
    both = case.values == "other pages"
    pages = used * (2 if both else 1) + 4  # some are unused
    order = torch.randperm(pages, generator=generator)
    keys = _filled(case, kv_format, order, pages, generator)
    if case.values == "shared":
        return [keys]
    values = _filled(case, kv_format, order[used if both else 0 :], pages, generator)
    # The rope part of a value must not be read.
    split = values.rows.shape[2] * case.kv_lora_rank // (case.kv_lora_rank + case.qk_rope_head_dim)
    values.rows[..., split:] = POISON
    if both:
        of_values = torch.cat([torch.tensor([], dtype=torch.long), *values.pages])
        keys.rows[of_values] = values.rows[of_values]
    return [keys, values]


def _filled(
    case: MlaCase, kv_format: str, order: torch.Tensor, pages: int, generator: torch.Generator
) -> _Cache:
    width = case.kv_lora_rank + case.qk_rope_head_dim
    slots = pages * case.page_size
    rows = torch.full((slots, row_bytes(kv_format, width)), POISON, dtype=torch.uint8)
    scales = None
    if kv_format == "fp8_per_token":
        scales = torch.full((slots,), math.nan)
    elif case.scales == "for 128 elements":
        scales = torch.full((slots, 4), math.nan)
    own_pages, own_rows = [], []
    for length, count in zip(case.seq_lens, case.page_counts, strict=True):
        own, order = order[:count], order[count:]
        content = torch.randn(length, width, generator=generator)
        given = {}
        if scales is not None:
            given["scales"] = torch.rand(length, *scales.shape[1:], generator=generator) / 16 + 0.02
        stored = store(
            content,
            case.kv_lora_rank,
            kv_format,
            latent_scale=LATENT_SCALE if case.scales == "two" else 1.0,
            rope_scale=ROPE_SCALE if case.scales else 1.0,
            **given,
        )
        at = _slots(own, length, case.page_size)
        rows[at] = stored.rows
        if scales is not None and stored.scales is not None:
            scales[at] = stored.scales
        own_pages.append(own)
        own_rows.append(stored)
    if scales is not None:
        scales = scales.view(pages, case.page_size, *scales.shape[1:])
    return _Cache(
        rows=rows.view(pages, case.page_size, -1), scales=scales, pages=own_pages, stored=own_rows
    )


def _query(case: MlaCase, generator: torch.Generator) -> _Query:
    tokens, width = sum(case.lens), case.kv_lora_rank + case.qk_rope_head_dim
    content = torch.randn(tokens * case.heads, width, generator=generator) * case.query_magnitude
    scales = torch.rand(tokens, generator=generator) / 16 + 0.02
    is_scaled = case.kv_format == "fp8_per_token"
    row_format = "fp8_per_token" if is_scaled else format_of(case.dtype)
    each = scales.repeat_interleave(case.heads) if is_scaled else None
    stored = store(content, case.kv_lora_rank, row_format, scales=each)
    return _Query(
        given=viewed(stored.rows, row_format).view(tokens, case.heads, -1),
        elements=stored.elements.view(tokens, case.heads, -1),
        scales=scales,
    )


def _bias(case: MlaCase, generator: torch.Generator) -> torch.Tensor | None:
    if not case.bias:
        return None
    heads = 1 if case.bias == "one for all heads" else case.heads
    positions = max(case.seq_lens, default=0) + 5
    bias = torch.randn(sum(case.lens), heads, positions, generator=generator) * 2
    bias[torch.rand(bias.shape, generator=generator) < 0.3] = -math.inf
    bias[::5] = -math.inf  # rows that attend to nothing
    for token, (_, _, visible) in enumerate(_placed(case)):
        bias[token, :, visible:] = math.nan
    return bias


def _tables(case: MlaCase, caches: list[_Cache]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the block tables, and kv_indptr if they are flat."""
    if case.flat_tables:
        pages = caches[0].pages
        starts = torch.tensor([0, *case.page_counts]).cumsum(0)
        padding = torch.tensor(INVALID_IDS * 2)
        return torch.cat([*pages, padding]).to(torch.int32), starts.to(torch.int32)
    columns = max(case.page_counts, default=0) + case.spare_pages
    both = case.values == "other pages"
    tables = torch.tensor(INVALID_IDS).repeat(len(case.seq_lens) * 2 * (columns // 4 + 1))
    tables = tables.view(len(case.seq_lens), 2, -1)[..., :columns].to(torch.int32).contiguous()
    for which, cache in enumerate(caches if both else caches[:1]):
        for seq, own in enumerate(cache.pages):
            tables[seq, which, : len(own)] = own.to(torch.int32)
    return (tables if both else tables[:, 0].contiguous()), None


def _topk_indices(
    case: MlaCase, cache: _Cache, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the top-k indices, their valid lengths, and the tokens that they name.

    Indices are scattered and repeated; every fifth is invalid; past the valid length they name
    tokens of the sequence and pages of poison.
    """
    tokens, slots_in_cache = sum(case.lens), cache.rows.shape[0] * case.page_size
    indices = torch.randint(0, slots_in_cache, (tokens, case.top_k), generator=generator)
    lens_given = torch.randint(0, case.top_k + 1, (tokens,), generator=generator)
    chosen = []
    for token, (seq, _, visible) in enumerate(_placed(case) if case.top_k else ()):
        valid = int(lens_given[token]) if case.with_top_k_lens else min(visible, case.top_k)
        slots = cache.slots_of(seq, case.page_size)
        if len(slots) == 0:
            indices[token, :valid] = -1
            chosen.append(torch.tensor([], dtype=torch.long))
            continue
        picked = torch.randint(0, len(slots), (valid,), generator=generator)
        entries = slots[picked]
        is_invalid = torch.rand(valid, generator=generator) < 0.2
        invalid_ids = torch.tensor((*INVALID_IDS, slots_in_cache))
        entries[is_invalid] = invalid_ids[torch.arange(int(is_invalid.sum())) % len(invalid_ids)]
        indices[token, :valid] = entries
        chosen.append(picked[~is_invalid])
    return indices.to(torch.int32), lens_given.to(torch.int32), chosen


def _in_layout(rows: torch.Tensor, cache_layout: str, row_format: str) -> torch.Tensor:
    """Return bytes ``[pages, page_size, row bytes]`` in a cache layout of the entry points."""
    pages, page_size, width = rows.shape
    if cache_layout == "strided":
        # Rows have 128 more bytes and pages a spare row, all of it NaN.
        shape = (pages, page_size + 1, width + 128)
        wide = torch.full(shape, POISON, dtype=torch.uint8, device=rows.device)
        wide[:, :page_size, :width] = rows
        element = viewed(wide, row_format)
        return element[:, :page_size, : width // element.element_size()]
    cache = viewed(rows, row_format)
    if cache_layout == "[P,1,ps,d]":
        return cache.unsqueeze(1)
    return cache.unsqueeze(2) if cache_layout == "[P,ps,1,d]" else cache


def shard(problem: MlaProblem, case: MlaCase) -> MlaProblem:
    """Return the problem with the tokens of the rank of ``case`` in a cache of their own.

    Everything else in that cache is poison.
    """
    rows, size = problem.kv_cache.view(torch.uint8), case.page_size
    lens = case.local_lens
    counts = [-(-length // size) for length in lens]
    columns = max(counts, default=0) + case.spare_pages
    tables = torch.tensor(INVALID_IDS * columns)[:columns].repeat(len(lens), 1)
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(case.cp_rank))
    own = torch.full((len(order), *rows.shape[1:]), POISON, dtype=torch.uint8, device=rows.device)
    all_tables = problem.block_tables.cpu().long()
    for seq, (length, count) in enumerate(zip(lens, counts, strict=True)):
        tables[seq, :count], order = order[:count], order[count:]
        index = torch.arange(length)
        token = index * case.cp_world + case.cp_rank
        own[tables[seq, index // size], index % size] = rows[
            all_tables[seq, token // size], token % size
        ]
    seqs = [seq for seq, q_len in enumerate(case.lens) for _ in range(q_len)]
    return replace(
        problem,
        case=case,
        kv_cache=own.view(problem.kv_cache.dtype),
        block_tables=tables.to(torch.int32).to(rows.device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=rows.device),
        visible=[
            _of_rank(tokens, case, lens[seq])
            for tokens, seq in zip(problem.visible, seqs, strict=True)
        ],
    )


def _of_rank(tokens: VisibleTokens, case: MlaCase, length: int) -> VisibleTokens:
    attended = max(0, len(tokens.keys) - case.tokens_ahead)
    own = torch.arange(attended)[case.cp_rank :: case.cp_world][:length]
    return replace(
        tokens, keys=tokens.keys[own], values=tokens.values[own], counts=tokens.counts[own]
    )
