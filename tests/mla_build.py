"""Tensors of MLA decode problems; tests/cases.py defines the cases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tests.cases import MlaCase, MlaProblem, VisibleTokens
from tests.mla_rows import POISON, Stored, format_of, row_bytes, store, viewed

# Block-table entries past the last page of a sequence, and top-k indices that are never read
# or must be skipped.
INVALID_IDS = (-1, 2**31 - 1, -(2**31), 1_000_000_000)

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
        positions = torch.arange(len(self.stored[seq].rows))
        pages = self.pages[seq][positions // page_size]
        return pages * page_size + positions % page_size


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
    lens = case.q_lens or (case.q_len,) * len(case.seq_lens)
    query = _query(case, sum(lens), generator)
    sinks = torch.randn(case.heads, generator=generator) * 3 if case.with_sinks else None
    bias = _bias(case, lens, generator)
    indices, top_k_lens, chosen = _topk_indices(case, lens, caches[0], generator)
    tables, kv_indptr = _tables(case, caches)
    extra_args: dict[str, Any] = {
        "is_causal": case.is_causal,
        "scores_take_bmm2": case.scores_take_bmm2,
        "bias": bias,
        "kv_indptr": kv_indptr,
        **_scale_fields(case, caches[0], query),
    }
    rows = caches[0].rows
    if case.values == "other cache":
        extra_args["value_cache"] = _in_layout(
            caches[1].rows.to(device), case.cache_layout, kv_format
        )
    given_query = query.given
    if case.separate_rope:
        width = case.kv_lora_rank + case.qk_rope_head_dim
        split = rows.shape[2] * case.kv_lora_rank // width
        extra_args["rope_cache"] = _in_layout(rows[..., split:].to(device), "strided", kv_format)
        rows = rows[..., :split].contiguous()
        extra_args["query_rope"] = _uniform(
            case, query.given[..., case.kv_lora_rank :].contiguous()
        )
        given_query = query.given[..., : case.kv_lora_rank].contiguous()
    ends = torch.tensor((0, *lens)).cumsum(0).to(torch.int32).to(device)
    return MlaProblem(
        case=case,
        query=_uniform(case, given_query).to(device),
        kv_cache=_in_layout(rows.to(device), case.cache_layout, kv_format),
        block_tables=(_uniform(case, indices) if case.top_k else tables).to(device),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32).to(device),
        sinks=sinks.to(device) if sinks is not None else None,
        cum_seq_lens_q=ends if case.q_lens is not None else None,
        top_k_lens=top_k_lens.to(device) if case.with_top_k_lens else None,
        visible=_visible_tokens(case, lens, caches, query, bias, chosen),
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
    lens: tuple[int, ...],
    caches: list[_Cache],
    query: _Query,
    bias: torch.Tensor | None,
    chosen: list[torch.Tensor],
) -> list[VisibleTokens]:
    tokens = []
    for token, (seq, visible) in enumerate(_visible_lengths(case, lens)):
        order, counts = torch.arange(visible), torch.ones(visible)
        if case.top_k:
            order, counts = torch.unique(chosen[token], return_counts=True)
        tokens.append(
            VisibleTokens(
                query=query.elements[token],
                keys=caches[0].stored[seq].elements[order],
                values=caches[-1].stored[seq].elements[order, : case.kv_lora_rank],
                counts=counts.double(),
                bias=bias[token, :, :visible].double() if bias is not None else None,
            )
        )
    return tokens


def _caches(case: MlaCase, kv_format: str, generator: torch.Generator) -> list[_Cache]:
    """Return the cache of keys, and that of values if separate."""
    used = [-(-length // case.page_size) for length in case.seq_lens]
    both = case.values == "other pages"
    pages = sum(used) * (2 if both else 1) + 4  # some are unused
    order = torch.randperm(pages, generator=generator)
    keys = _filled(case, kv_format, order, pages, generator)
    if case.values == "shared":
        return [keys]
    if both:
        values = _filled(case, kv_format, order[sum(used) :], pages, generator)
    else:
        values = _filled(case, kv_format, order, pages, generator)
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
    shape = (pages * case.page_size, row_bytes(kv_format, width))
    rows = torch.full(shape, POISON, dtype=torch.uint8)
    scales = None
    if kv_format == "fp8_per_token":
        scales = torch.full((shape[0],), math.nan)
    elif case.scales == "for 128 elements":
        scales = torch.full((shape[0], 4), math.nan)
    own_pages, own_rows = [], []
    for length in case.seq_lens:
        count = -(-length // case.page_size)
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
        positions = torch.arange(length)
        slots = own[positions // case.page_size] * case.page_size + positions % case.page_size
        rows[slots] = stored.rows
        if scales is not None and stored.scales is not None:
            scales[slots] = stored.scales
        own_pages.append(own)
        own_rows.append(stored)
    if scales is not None:
        scales = scales.view(pages, case.page_size, *scales.shape[1:])
    return _Cache(
        rows=rows.view(pages, case.page_size, -1), scales=scales, pages=own_pages, stored=own_rows
    )


def _query(case: MlaCase, tokens: int, generator: torch.Generator) -> _Query:
    width = case.kv_lora_rank + case.qk_rope_head_dim
    content = torch.randn(tokens * case.heads, width, generator=generator) * case.query_magnitude
    row_format = format_of(case.dtype)
    scales = torch.rand(tokens, generator=generator) / 16 + 0.02
    if case.kv_format == "fp8_per_token":
        row_format = "fp8_per_token"
        each = scales.repeat_interleave(case.heads)
        stored = store(content, case.kv_lora_rank, row_format, scales=each)
    else:
        stored = store(content, case.kv_lora_rank, row_format)
    return _Query(
        given=viewed(stored.rows, row_format).view(tokens, case.heads, -1),
        elements=stored.elements.view(tokens, case.heads, -1),
        scales=scales,
    )


def _bias(case: MlaCase, lens: tuple[int, ...], generator: torch.Generator) -> torch.Tensor | None:
    if not case.bias:
        return None
    heads = 1 if case.bias == "one for all heads" else case.heads
    positions = max(case.seq_lens, default=0) + 5
    bias = torch.randn(sum(lens), heads, positions, generator=generator) * 2
    bias[torch.rand(bias.shape, generator=generator) < 0.3] = -math.inf
    bias[::5] = -math.inf  # rows that attend to nothing
    for token, (_, visible) in enumerate(_visible_lengths(case, lens)):
        bias[token, :, visible:] = math.nan
    return bias


def _visible_lengths(case: MlaCase, lens: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the sequence of every query token, and the number of its tokens to attend to."""
    lengths = []
    for seq, (length, q_len) in enumerate(zip(case.seq_lens, lens, strict=True)):
        later = range(q_len - 1, -1, -1) if case.is_causal else [0] * q_len
        lengths += [(seq, max(0, length - masked)) for masked in later]
    return lengths


def _tables(case: MlaCase, caches: list[_Cache]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the block tables, and kv_indptr if they are flat."""
    if case.flat_tables:
        pages = caches[0].pages
        starts = torch.tensor([0, *(len(own) for own in pages)]).cumsum(0)
        padding = torch.tensor(INVALID_IDS * 2)
        return torch.cat([*pages, padding]).to(torch.int32), starts.to(torch.int32)
    columns = max((len(own) for own in caches[0].pages), default=0) + case.spare_pages
    both = case.values == "other pages"
    tables = torch.tensor(INVALID_IDS).repeat(len(case.seq_lens) * 2 * (columns // 4 + 1))
    tables = tables.view(len(case.seq_lens), 2, -1)[..., :columns].to(torch.int32).contiguous()
    for which, cache in enumerate(caches if both else caches[:1]):
        for seq, own in enumerate(cache.pages):
            tables[seq, which, : len(own)] = own.to(torch.int32)
    return (tables if both else tables[:, 0].contiguous()), None


def _topk_indices(
    case: MlaCase, lens: tuple[int, ...], cache: _Cache, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the top-k indices, their valid lengths, and the tokens that they name.

    Indices are scattered and repeated; every fifth is invalid; past the valid length they name
    tokens of the sequence and pages of poison.
    """
    tokens, slots_in_cache = sum(lens), cache.rows.shape[0] * case.page_size
    indices = torch.randint(0, slots_in_cache, (tokens, case.top_k), generator=generator)
    lens_given = torch.randint(0, case.top_k + 1, (tokens,), generator=generator)
    chosen = []
    for token, (seq, visible) in enumerate(_visible_lengths(case, lens) if case.top_k else ()):
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
        wide = torch.full(
            (pages, page_size + 1, width + 128), POISON, dtype=torch.uint8, device=rows.device
        )
        wide[:, :page_size, :width] = rows
        element = viewed(wide, row_format)
        return element[:, :page_size, : width // element.element_size()]
    cache = viewed(rows, row_format)
    if cache_layout == "[P,1,ps,d]":
        return cache.unsqueeze(1)
    return cache.unsqueeze(2) if cache_layout == "[P,ps,1,d]" else cache
