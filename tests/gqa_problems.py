"""GQA decode problems by name, with poison in all memory that must not be read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any

import torch

from tests.gqa_content import POISONED, Content, Store
from tests.reference import Attention, assert_close, attend, output_tolerance, stack

E4M3 = torch.float8_e4m3fn

# Entries of the block table past the last page of a sequence.
WILD_PAGES = (-1, 2**31 - 1, -(2**31), 1_000_000)


@dataclass(frozen=True, kw_only=True)
class GqaCase:
    """One problem; ``q_lens`` makes it ragged, else every sequence has ``q_len`` query tokens."""

    name: str
    seq_lens: tuple[int, ...]
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    q_len: int = 1
    q_lens: tuple[int, ...] | None = None
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv: str = "16-bit"  # or "e4m3", "int8", "nvfp4"
    out_dtype: torch.dtype | None = None  # None: the query's
    score_scale: float | None = None  # None: scores of about 1
    output_scale: float = 1.0
    o_scale: float = 1.0
    window: int = 0  # tokens that a row attends to, 0 for no limit
    sink: float | None = None  # magnitude
    mask: str | None = None  # "causal", "full", "random" or "blind"; None: no mask
    layout: str = "NHD"
    cache_layout: str = (
        "tuple"  # or "list", "stacked", "strided", or "shared" for one tensor of keys and values
    )
    query_magnitude: float = 1.0
    spare_pages: int = 3  # columns of the block table past the longest sequence
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def lens(self) -> tuple[int, ...]:
        """Query tokens of each sequence."""
        return self.q_lens or (self.q_len,) * len(self.seq_lens)

    @property
    def longest_q(self) -> int:
        """The ``q_len`` argument: the longest query of a sequence."""
        return max(2, *self.q_lens) if self.q_lens else self.q_len

    @property
    def scale(self) -> float:
        """Scale of the QK scores."""
        if self.score_scale is not None:
            return self.score_scale
        return 1 / (math.sqrt(self.head_dim) * Content.DEVIATION[self.kv])

    @property
    def result_dtype(self) -> torch.dtype:
        """Dtype of the output."""
        return self.out_dtype or self.dtype

    @property
    def result_scale(self) -> float:
        """Scale of the output."""
        return self.output_scale * (1.0 if self.result_dtype is E4M3 else self.o_scale)

    def build(self, device: str) -> GqaProblem:
        """Return the tensors on ``device`` and the data for checking a result."""
        return _build(self, device)


@dataclass(frozen=True, kw_only=True)
class GqaProblem:
    """The tensors of a case, and the tokens of each sequence in order."""

    case: GqaCase
    query: torch.Tensor  # [tokens, heads, head_dim]
    store: Store
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    sinks: torch.Tensor | None
    bits: torch.Tensor | None  # bool [tokens, 32 * words]
    cum_seq_lens_q: torch.Tensor | None
    contents: list[Content] = field(repr=False)  # of each sequence, CPU

    @property
    def mask(self) -> torch.Tensor | None:
        """The mask in the format of the entry points."""
        if self.bits is None:
            return None
        case = self.case
        words = (self.bits.long().view(len(self.bits), -1, 32) << torch.arange(32)).sum(-1)
        halves = words.to(torch.uint32).view(torch.uint16).to(self.query.device)
        return halves if case.q_lens else halves.view(len(case.seq_lens), case.q_len, -1)

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Return the keyword arguments of ``xqa_batch_decode_with_kv_cache``."""
        case, device = self.case, self.query.device
        size = 64 << 20 if device.type == "cuda" else 1024  # the CPU backend needs none
        arguments: dict[str, Any] = {
            "query": self.query,
            "kv_cache": self.store.caches(case.cache_layout, case.layout),
            "workspace_buffer": torch.full((size,), 0xFF, dtype=torch.uint8, device=device),
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "max_seq_len": max(case.seq_lens, default=0),
            "bmm1_scale": case.scale,
            "bmm2_scale": case.output_scale,
            "window_left": case.window - 1,
            "sinks": self.sinks,
            "kv_layout": case.layout,
            "q_len_per_req": case.longest_q,
            "o_scale": case.o_scale,
            "mask": self.mask,
            "kv_cache_sf": self.store.scales(case.cache_layout, case.layout),
            "q_cu_seq_lens": self.cum_seq_lens_q,
        }
        if case.out_dtype is not None:
            arguments["out"] = torch.empty(self.query.shape, dtype=case.out_dtype, device=device)
        return arguments | changes

    def visible(self, seq: int, draft: int, token: int) -> torch.Tensor:
        """Return the positions that draft ``draft``, query token ``token``, attends to."""
        case = self.case
        position = torch.arange(case.seq_lens[seq])
        j = position - (len(position) - case.lens[seq])
        is_seen = j <= draft
        if self.bits is not None:
            is_seen = (j < 0) | self.bits[token][j.clamp(min=0)]
        if case.window:
            is_seen &= j > draft - case.window
        return position[is_seen]

    def expected(self) -> Attention:
        """Return the float64 result: out ``[tokens, heads, head_dim]``."""
        case = self.case
        rows = self.query.cpu().view(-1, case.kv_heads, case.group, case.head_dim)
        sinks = self.sinks.cpu().view(case.kv_heads, case.group) if self.sinks is not None else None
        parts = []
        for seq, (start, end) in enumerate(pairwise(accumulate(case.lens, initial=0))):
            content = self.contents[seq]
            for token in range(start, end):
                visible = self.visible(seq, token - start, token)
                heads = [
                    attend(
                        rows[token, head],
                        content.keys[visible, head],
                        content.values[visible, head],
                        score_scale=case.scale,
                        output_scale=case.result_scale,
                        sinks=sinks[head] if sinks is not None else None,
                    )
                    for head in range(case.kv_heads)
                ]
                parts.append(joined(heads))
        return stack(parts)

    def check(self, out: torch.Tensor) -> None:
        """Fail unless every element of ``out`` is right."""
        expected = self.expected()
        assert out.dtype is self.case.result_dtype
        tolerance = result_tolerance(self.case.dtype, out.dtype, expected)
        assert_close(out.float().reshape(expected.out.shape), expected.out, tolerance, "out")


def joined(parts: list[Attention]) -> Attention:
    """Return the concatenated results of head groups."""
    names = [field.name for field in fields(Attention)]
    return Attention(**{name: torch.cat([getattr(p, name) for p in parts]) for name in names})


def result_tolerance(
    weights_dtype: torch.dtype, out_dtype: torch.dtype, expected: Attention
) -> torch.Tensor:
    """Return the largest error that rounding explains, for every element of ``expected.out``.

    Keys and values are exact in 16 bits. Rounding to e4m3 errs by 2^-4 of the number, or by half of
    the smallest step, 2^-10.
    """
    if out_dtype is not E4M3:
        return output_tolerance(out_dtype, expected, weights_dtype)
    before = output_tolerance(weights_dtype, expected)
    return before + 2.0**-4 * (expected.out.abs() + before) + 2.0**-10


def _build(case: GqaCase, device: str) -> GqaProblem:
    generator = torch.Generator().manual_seed(case.seed)
    used = [-(-length // case.page_size) for length in case.seq_lens]
    pages = sum(used) + 4  # some are unused
    order = torch.randperm(pages, generator=generator)
    store = POISONED[case.kv](case, pages)
    width = max(used, default=0) + case.spare_pages
    tables = torch.tensor(WILD_PAGES).repeat(len(used), width)[:, :width].to(torch.int32)
    contents = []
    first = 0
    for seq, (length, count) in enumerate(zip(case.seq_lens, used, strict=True)):
        ids = order[first : first + count]
        first += count
        contents.append(store.fill(ids, length, generator))
        tables[seq, :count] = ids.to(torch.int32)
    tokens = sum(case.lens)
    query = torch.randn(tokens, case.heads, case.head_dim, generator=generator)
    cumulative = None
    if case.q_lens is not None:
        ends = torch.tensor(list(accumulate(case.q_lens, initial=0)), dtype=torch.int32)
        cumulative = ends.to(device)
    sinks = None
    if case.sink is not None:
        sinks = (torch.randn(case.heads, generator=generator) * case.sink).to(device)
    return GqaProblem(
        case=case,
        query=(query * case.query_magnitude).to(case.dtype).to(device),
        store=store.to(device),
        block_tables=tables.to(device),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32).to(device),
        sinks=sinks,
        bits=_bits(case, generator),
        cum_seq_lens_q=cumulative,
        contents=contents,
    )


def _bits(case: GqaCase, generator: torch.Generator) -> torch.Tensor | None:
    if case.mask is None:
        return None
    columns = 32 * math.ceil(case.longest_q / 32)
    drafts = torch.cat([torch.arange(length) for length in case.lens])[:, None]
    # Bits past the drafts of a sequence are random, since they mean nothing.
    bits = torch.rand(len(drafts), columns, generator=generator) < 0.5
    lens = torch.cat([torch.full((length,), length) for length in case.lens])[:, None]
    is_draft = torch.arange(columns) < lens
    if case.mask == "random":
        return bits
    shown = {
        "causal": torch.arange(columns) <= drafts,
        "full": torch.ones_like(bits),
        "blind": torch.zeros_like(bits),
    }
    return torch.where(is_draft, shown[case.mask], bits)
