"""GQA decode problems: their facts, tensors and float64 results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product
from typing import Any

import torch

from tests.problems.gqa_store import DEVIATION, STORES, Content, Store
from tests.problems.problem import E4M3, INVALID_IDS, Case, Problem
from tests.problems.reference import Attention, attend, joined


@dataclass(frozen=True, kw_only=True)
class GqaCase(Case):
    """The facts of a GQA problem."""

    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    page_size: int = 16
    kv: str = "16-bit"  # or "e4m3", "int8", "nvfp4"
    out_dtype: torch.dtype | None = None  # None: the query's
    score_scale: float | None = None  # None: scores of about 1
    o_scale: float = 1.0
    window: int = 0  # tokens that a row attends to, 0 for no limit
    sink: float | None = None  # magnitude
    causal: bool = True
    mask: str | None = None  # "causal", "full", "random" or "blind"; None: no mask
    layout: str = "NHD"
    cache_layout: str = "tuple"  # or "list", "stacked", "strided", or "shared" by keys and values

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def longest_q(self) -> int:
        """The ``q_len`` argument: the longest query of a sequence."""
        return max(2, *self.q_lens) if self.q_lens else self.q_len

    @property
    def scale(self) -> float:
        """Scale of the QK scores."""
        if self.score_scale is not None:
            return self.score_scale
        return 1 / (math.sqrt(self.head_dim) * DEVIATION[self.kv])

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


# Query, cache and output dtypes.
KINDS: dict[str, dict[str, Any]] = {
    f"{name} over {kv}" + " to e4m3" * to_e4m3: {
        "dtype": dtype,
        "kv": kv,
        "out_dtype": E4M3 if to_e4m3 else None,
        "output_scale": 1.0 if kv == "16-bit" else 0.5,
    }
    for kv, to_e4m3 in (
        *(("16-bit", False), ("e4m3", False), ("e4m3", True)),
        *(("int8", False), ("nvfp4", False)),
    )
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
}
SOME_KINDS = ("bf16 over 16-bit", "bf16 over e4m3", "fp16 over int8", "bf16 over nvfp4")


def gqa_case(kind: str, **facts: Any) -> GqaCase:
    """Return a case of one of :data:`KINDS`."""
    return GqaCase(**KINDS[kind] | facts)


@dataclass(frozen=True, kw_only=True)
class GqaProblem(Problem):
    """The tensors of a GQA case, and the tokens of each sequence in order."""

    case: GqaCase
    store: Store
    bits: torch.Tensor | None  # bool [tokens, 32 * words]
    contents: list[Content] = field(repr=False)  # of each sequence, CPU

    @property
    def math_dtype(self) -> torch.dtype:
        """The dtype of the query."""
        return self.case.dtype

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype that the case names, or the query's."""
        return self.case.result_dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the query, ``[tokens, heads, head_dim]``."""
        return tuple(self.query.shape)

    @property
    def keys(self) -> torch.Tensor:
        """The pages of keys."""
        return self.store.key

    @property
    def mask(self) -> torch.Tensor | None:
        """The mask in the format of the entry points."""
        if self.bits is None:
            return None
        case = self.case
        words = (self.bits.long().view(len(self.bits), -1, 32) << torch.arange(32)).sum(-1)
        halves = words.to(torch.uint32).view(torch.uint16).to(self.device)
        return halves if case.q_lens else halves.view(len(case.seq_lens), case.q_len, -1)

    def poison(self, seq: int, position: int) -> None:
        """Make key and value of a cached token NaN."""
        self.store.poison(self.slot(seq, position))

    def attract(self, seq: int, position: int) -> torch.Tensor:
        """Make the only query row of a sequence match one key; return that token's value."""
        slot = self.slot(seq, position)
        self.store.key[slot] = self.query[seq]
        return self.store.value[slot][0]

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Return the keyword arguments of ``xqa_batch_decode_with_kv_cache``."""
        case, device = self.case, self.device
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
            "causal": case.causal,
        }
        if case.out_dtype is not None:
            arguments["out"] = torch.empty(self.query.shape, dtype=case.out_dtype, device=device)
        return arguments | changes

    def visible(self, seq: int, index: int) -> torch.Tensor:
        """Return the positions that a query token of a sequence attends to."""
        case = self.case
        position = torch.arange(case.seq_lens[seq])
        draft = position - (len(position) - case.lens[seq])
        is_seen = (draft <= index) | (not case.causal)
        if self.bits is not None:
            token = sum(case.lens[:seq]) + index
            is_seen = (draft < 0) | self.bits[token][draft.clamp(min=0)]
        if case.window:
            is_seen &= draft > index - case.window
        return position[is_seen]

    def sees(self, seq: int, index: int, position: int) -> bool:
        """Return whether a query token attends to a position."""
        return position in self.visible(seq, index)

    def expected(self) -> Attention:
        """Return the float64 result: out ``[tokens, heads, head_dim]``."""
        case = self.case
        rows = self.query.cpu().view(-1, case.kv_heads, case.group, case.head_dim)
        sinks = self.sinks.cpu().view(case.kv_heads, case.group) if self.sinks is not None else None
        parts = []
        for seq, (start, end) in enumerate(pairwise(accumulate(case.lens, initial=0))):
            content = self.contents[seq]
            for token in range(start, end):
                visible = self.visible(seq, token - start)
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
                parts.append(joined(heads, torch.cat))
        return joined(parts)

    def variants(
        self,
        *,
        windows: Sequence[int] = (0,),
        sinks: Sequence[bool] = (True,),
        masks: Sequence[str | None] = (None,),
    ) -> Iterator[GqaProblem]:
        """Yield the same cache and queries under other windows, sinks and masks."""
        for window, has_sinks, mask in product(windows, sinks, masks):
            case = replace(self.case, window=window, mask=mask)
            own_sinks = self.sinks if has_sinks else None
            # The bits of a mask do not depend on the cache.
            empty = replace(case, seq_lens=(0,) * len(case.seq_lens), sink=None)
            yield replace(self, case=case, sinks=own_sinks, bits=empty.build("cpu").bits)


def _build(case: GqaCase, device: str) -> GqaProblem:
    generator = torch.Generator().manual_seed(case.seed)
    used = case.page_counts
    pages = sum(used) + 4  # some are unused
    order = torch.randperm(pages, generator=generator)
    store = STORES[case.kv](case, pages)
    width = max(used, default=0) + case.spare_pages
    tables = torch.tensor(INVALID_IDS).repeat(len(used), width)[:, :width].to(torch.int32)
    contents = []
    for seq, (length, count) in enumerate(zip(case.seq_lens, used, strict=True)):
        ids, order = order[:count], order[count:]
        contents.append(store.fill(ids, length, generator))
        tables[seq, :count] = ids.to(torch.int32)
    query = torch.randn(sum(case.lens), case.heads, case.head_dim, generator=generator)
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
    columns = torch.arange(32 * math.ceil(case.longest_q / 32))
    drafts = torch.cat([torch.arange(length) for length in case.lens])[:, None]
    # Bits past the drafts of a sequence are random, since they mean nothing.
    bits = torch.rand(len(drafts), len(columns), generator=generator) < 0.5
    lens = torch.cat([torch.full((length,), length) for length in case.lens])[:, None]
    if case.mask == "random":
        return bits
    shown = {
        "causal": columns <= drafts,
        "full": torch.ones_like(bits),
        "blind": torch.zeros_like(bits),
    }
    return torch.where(columns < lens, shown[case.mask], bits)
