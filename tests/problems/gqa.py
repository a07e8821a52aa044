"""GQA decode problems: facts, KV caches of every dtype with poison around them, and results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import torch

from tests.problems.problem import E4M3, INVALID_IDS, Case, Problem
from tests.problems.reference import Attention, attend, joined

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_VALUES = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64)
_BLOCK = 16  # elements per scale
_NAN_BYTE = 0x7F  # in e4m3 and in e5m2

# Standard deviation of the elements of each kind.
DEVIATION = {"16-bit": 1.0, "e4m3": 1.0, "e5m2": 1.0, "int8": 73.0, "nvfp4": 2.9}


class Content(NamedTuple):
    """Keys and values of one sequence in float64, ``[seq_len, kv_heads, head_dim]``."""

    keys: torch.Tensor
    values: torch.Tensor
    value_scales: torch.Tensor | None = None  # ``[seq_len, kv_heads]``, of each token


def _bits(cache: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers, since no 8-bit float can be indexed."""
    return cache.view(torch.int16 if cache.element_size() == 2 else torch.uint8)


@dataclass(frozen=True)
class Store:
    """Pages ``[pages, page_size, kv_heads, ...]`` of keys and values, and of their scales."""

    case: GqaCase
    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    rows: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict, init=False)  # inline

    def fill(
        self, ids: torch.Tensor, value_ids: torch.Tensor, length: int, generator: torch.Generator
    ) -> Content:
        """Store ``length`` tokens in the pages of keys and of values; return them in float64."""
        keys, key_scales = self._fill(self.key, self.key_scale, ids, length, generator)
        if self.case.cache_layout == "shared":
            return Content(keys, keys, key_scales)
        return Content(
            keys, *self._fill(self.value, self.value_scale, value_ids, length, generator)
        )

    def _fill(
        self,
        cache: torch.Tensor,
        scale: torch.Tensor | None,
        ids: torch.Tensor,
        length: int,
        generator: torch.Generator,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        case = self.case
        dims = case.head_dim if cache is self.key else case.value_dim
        shape = (length, case.kv_heads, dims)
        position = torch.arange(length)
        at = (ids[position // case.page_size], position % case.page_size)
        if case.kv != "nvfp4":
            if case.kv == "int8":
                stored = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
            else:
                stored = torch.randn(shape, generator=generator).to(cache.dtype)
            _bits(cache)[at] = _bits(stored)
            if scale is None:
                return stored.double(), None
            spread = torch.rand(shape[:2], generator=generator) * 1.5 + 0.25
            if cache is self.value:  # scores would be of all magnitudes
                limit = case.scale_spread
                exponents = torch.randint(-limit, limit + 1, shape[:2], generator=generator)
                spread *= torch.exp2(exponents.float())
            scale[at] = spread * 2.0**case.scale_exponent / DEVIATION[case.kv]
            factors = scale[at].double()
            return stored.double() * factors[..., None], factors
        assert scale is not None
        nibbles = torch.randint(0, 16, shape, generator=generator)
        blocks = (*shape[:2], shape[2] // _BLOCK)
        factors = (torch.rand(blocks, generator=generator) * 2).to(E4M3)
        cache[at] = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).to(torch.uint8)
        scale[at] = factors.view(torch.uint8)
        return _E2M1_VALUES[nibbles] * factors.double().repeat_interleave(_BLOCK, dim=-1), None

    def poison(self, slot: tuple[int, int]) -> None:
        """Make key and value of one token NaN."""
        if self.key_scale is not None and self.value_scale is not None:
            is_nvfp4 = self.case.kv == "nvfp4"
            self.key_scale[slot] = self.value_scale[slot] = _NAN_BYTE if is_nvfp4 else math.nan
        elif self.case.kv in {"e4m3", "e5m2"}:
            _bits(self.key)[slot] = _bits(self.value)[slot] = _NAN_BYTE
        else:
            self.key[slot] = self.value[slot] = math.nan

    def to(self, device: str) -> Store:
        """Return the store on ``device``."""
        moved = replace(self, key=self.key.to(device), value=self.value.to(device))
        if self.key_scale is None or self.value_scale is None:
            return moved
        scales = (self.key_scale.to(device), self.value_scale.to(device))
        return replace(moved, key_scale=scales[0], value_scale=scales[1])

    def caches(self, cache_layout: str, layout: str) -> object:
        """Return keys and values in a cache layout of the entry points."""
        if cache_layout == "inline":
            self.rows[layout] = self._inline(layout)  # those that the scales are of
            return self.rows[layout][:2]
        return _in_layout(self.key, self.value, cache_layout, layout)

    def scales(self, cache_layout: str, layout: str) -> object:
        """Return the scales in the layout of the caches; None without scales."""
        if self.key_scale is None or self.value_scale is None:
            return None
        if cache_layout == "inline":
            return self.rows[layout][2:]
        parts = (self.key_scale, self.value_scale)
        if self.case.has_token_scales:
            scales: Any = _in_layout(parts[0][..., None], parts[1][..., None], cache_layout, layout)
            is_whole = isinstance(scales, torch.Tensor)
            return scales[..., 0] if is_whole else tuple(scale[..., 0] for scale in scales)
        scales = _in_layout(*parts, cache_layout, layout)
        if isinstance(scales, torch.Tensor):  # the two accepted byte dtypes
            return scales.view(E4M3)
        return scales

    def _inline(self, layout: str) -> tuple[torch.Tensor, ...]:
        """Return keys, values and their scales in the pages of vLLM: a row has them all."""
        assert self.key_scale is not None
        assert self.value_scale is not None
        parts = (self.key, self.key_scale[..., None], self.value, self.value_scale[..., None])
        rows = torch.cat([part.view(torch.uint8) for part in parts], dim=-1)
        if layout == "HND":
            rows = rows.transpose(1, 2).contiguous()
        widths = [part.shape[-1] * part.element_size() for part in parts]
        keys, key_scales, values, value_scales = torch.split(rows, widths, dim=-1)
        caches = (keys.view(self.key.dtype), values.view(self.value.dtype))
        scales = (part.view(torch.float32)[..., 0] for part in (key_scales, value_scales))
        return (*caches, *scales)


def _in_layout(key: torch.Tensor, value: torch.Tensor, cache_layout: str, layout: str) -> object:
    if layout == "HND":
        key, value = (part.transpose(1, 2).contiguous() for part in (key, value))
    if cache_layout == "stacked":
        return torch.stack([key, value], dim=1)
    if cache_layout == "shared":
        return key[:, None]
    if cache_layout == "strided":
        return [_padded(key, 1), _padded(value, 2)]
    return [key, value] if cache_layout == "list" else (key, value)


def _padded(cache: torch.Tensor, extra: int) -> torch.Tensor:
    """Return a view in a cache with more elements, heads, tokens and pages, all of it poison."""
    pages, first, second, width = cache.shape
    shape = (pages + extra, first + extra, second + extra, width + 32 * extra)
    wide = torch.empty(shape, dtype=cache.dtype, device=cache.device)
    wide.view(torch.uint8).fill_(_NAN_BYTE)
    if cache.dtype in (torch.bfloat16, torch.float16):
        wide.fill_(math.nan)
    wide[:pages, :first, :second, :width] = cache
    return wide[:pages, :first, :second, :width]


def _halves(case: GqaCase, pages: int) -> Store:
    shape = (pages, case.page_size, case.kv_heads)
    both = (case.head_dim, case.value_dim)
    return Store(case, *(torch.full((*shape, n), math.nan, dtype=case.dtype) for n in both))


def _bytes(case: GqaCase, pages: int, width: int) -> torch.Tensor:
    shape = (pages, case.page_size, case.kv_heads, width)
    return torch.full(shape, _NAN_BYTE, dtype=torch.uint8)


def _of(dtype: torch.dtype) -> Callable[[GqaCase, int], Store]:
    def store(case: GqaCase, pages: int) -> Store:
        both = (_bytes(case, pages, n).view(dtype) for n in (case.head_dim, case.value_dim))
        shape = (pages, case.page_size, case.kv_heads)
        scales = (torch.full(shape, math.nan) for _ in range(2 if case.has_token_scales else 0))
        return Store(case, *both, *scales)

    return store


def _nvfp4(case: GqaCase, pages: int) -> Store:
    both = (case.head_dim, case.value_dim)
    widths = [dims // per_byte for per_byte in (2, _BLOCK) for dims in both]
    return Store(case, *(_bytes(case, pages, width) for width in widths))


# An int8 cache has no NaN: unused memory holds large numbers.
STORES: dict[str, Callable[[GqaCase, int], Store]] = {
    "16-bit": _halves,
    "e4m3": _of(E4M3),
    "e5m2": _of(torch.float8_e5m2),
    "int8": _of(torch.int8),
    "nvfp4": _nvfp4,
}


@dataclass(frozen=True, kw_only=True)
class GqaCase(Case):
    """The facts of a GQA problem."""

    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    head_dim_vo: int = 0  # of values, 0 for those of keys
    page_size: int = 16
    kv: str = "16-bit"  # or "e4m3", "e5m2", "int8", "nvfp4"
    has_token_scales: bool = False  # of each token and KV head, over 8 bits
    scale_exponent: int = 0  # of the token scales, about a power of two
    scale_spread: int = 0  # of the exponents of those of values
    out_dtype: torch.dtype | None = None  # None: the query's
    score_scale: float | None = None  # None: scores of about 1
    o_scale: float = 1.0
    window: int = 0  # tokens that a row attends to, 0 for no limit
    soft_cap: float = 0.0  # of the scores, 0 for none
    sink: float | None = None  # magnitude
    causal: bool = True
    cp_world: int = 0  # ranks, of which this one's tokens are in the cache; 0 without DCP
    cp_rank: int = 0
    committed: tuple[int, ...] = ()  # tokens of each sequence on all ranks before its query tokens
    has_value_tables: bool = False  # keys and values have page ids of their own
    mask: str | None = None  # "causal", "full", "random" or "blind"; None: no mask
    layout: str = "NHD"
    # Or "list", "stacked", "strided"; "shared" by keys and values; "inline" with token scales.
    cache_layout: str = "tuple"

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def value_dim(self) -> int:
        """Elements of a value and of an output row."""
        return self.head_dim_vo or self.head_dim

    @property
    def longest_q(self) -> int:
        """The ``q_len`` argument: the longest query of a sequence."""
        return max(2, *self.q_lens) if self.q_lens else self.q_len

    @property
    def scale(self) -> float:
        """Scale of the QK scores."""
        if self.score_scale is not None:
            return self.score_scale
        return 1 / (math.sqrt(self.head_dim) * self.deviation)

    @property
    def deviation(self) -> float:
        """Standard deviation of the elements, times their scales."""
        return 2.0**self.scale_exponent if self.has_token_scales else DEVIATION[self.kv]

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
        *(("e5m2", False), ("int8", False), ("nvfp4", False)),
    )
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
}
KINDS |= {
    f"{name} over {kv} with token scales": KINDS[f"{name} over {kv}"] | {"has_token_scales": True}
    for name, kv in (("bf16", "int8"), ("fp16", "e4m3"))
}
SOME_KINDS = (
    *("bf16 over 16-bit", "bf16 over e4m3", "bf16 over e5m2", "fp16 over int8", "bf16 over nvfp4"),
    "bf16 over int8 with token scales",
)


def gqa_case(kind: str, **facts: Any) -> GqaCase:
    """Return a case of one of :data:`KINDS`."""
    return GqaCase(**KINDS[kind] | facts)


@dataclass(frozen=True, kw_only=True)
class GqaProblem(Problem):
    """The tensors of a GQA case, and the tokens of each sequence in order."""

    case: GqaCase
    store: Store
    value_tables: torch.Tensor | None  # None: block_tables are those of values too
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
        """The shape of the query with the dims of a value."""
        return (*self.query.shape[:-1], self.case.value_dim)

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

    def picked(self, seqs: Sequence[int]) -> GqaProblem:
        """Return some of the sequences, in this order, as a batch over the same cache."""
        case, picked = self.case, list(seqs)
        lens = [case.lens[seq] for seq in picked]
        starts = list(accumulate(case.lens, initial=0))
        tokens = [starts[seq] + index for seq in picked for index in range(case.lens[seq])]
        offsets = None
        if self.cum_seq_lens_q is not None:
            offsets = torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32)
        query = self.query.view(-1, case.heads, case.head_dim)[tokens]
        return replace(
            self,
            case=replace(
                case,
                seq_lens=tuple(case.seq_lens[seq] for seq in picked),
                q_lens=None if case.q_lens is None else tuple(lens),
                committed=tuple(case.committed[seq] for seq in picked) if case.committed else (),
            ),
            query=query.view(-1, *self.query.shape[1:]),
            block_tables=self.block_tables[picked],
            value_tables=None if self.value_tables is None else self.value_tables[picked],
            seq_lens=self.seq_lens[picked],
            cum_seq_lens_q=None if offsets is None else offsets.to(self.device),
            bits=None if self.bits is None else self.bits[tokens],
            contents=[self.contents[seq] for seq in picked],
        )

    def poison(self, seq: int, position: int) -> None:
        """Make key and value of a cached token NaN, which have one page."""
        assert self.value_tables is None
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
            "logits_soft_cap": case.soft_cap,
        }
        if case.out_dtype is not None:
            arguments["out"] = torch.empty(self.out_shape, dtype=case.out_dtype, device=device)
        return arguments | changes

    def visible(self, seq: int, index: int) -> torch.Tensor:
        """Return the positions that a query token of a sequence attends to."""
        case = self.case
        position = torch.arange(case.seq_lens[seq])
        if case.cp_world:
            return position[position * case.cp_world + case.cp_rank <= case.committed[seq] + index]
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
                        soft_cap=case.soft_cap,
                        sinks=sinks[head] if sinks is not None else None,
                        value_scales=_of_head(content.value_scales, visible, head),
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


def _of_head(
    scales: torch.Tensor | None, visible: torch.Tensor, head: int
) -> tuple[torch.Tensor, float] | None:
    """Return the scales of visible values, and the largest of all."""
    if scales is None or not len(scales):
        return None
    return scales[visible, head], float(scales[:, head].max())


def _build(case: GqaCase, device: str) -> GqaProblem:
    generator = torch.Generator().manual_seed(case.seed)
    used = case.page_counts
    pages = sum(used) + 4  # some are unused
    order = torch.randperm(pages, generator=generator)
    store = STORES[case.kv](case, pages)
    width = max(used, default=0) + case.spare_pages
    tables = torch.tensor(INVALID_IDS).repeat(len(used), width)[:, :width].to(torch.int32)
    values = torch.randperm(pages, generator=generator) if case.has_value_tables else order
    value_tables = tables.clone() if case.has_value_tables else None
    contents = []
    for seq, (length, count) in enumerate(zip(case.seq_lens, used, strict=True)):
        ids, order = order[:count], order[count:]
        value_ids, values = values[:count], values[count:]
        contents.append(store.fill(ids, value_ids, length, generator))
        tables[seq, :count] = ids.to(torch.int32)
        if value_tables is not None:
            value_tables[seq, :count] = value_ids.to(torch.int32)
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
        value_tables=None if value_tables is None else value_tables.to(device),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32).to(device),
        sinks=sinks,
        bits=_mask_bits(case, generator),
        cum_seq_lens_q=cumulative,
        contents=contents,
    )


def _mask_bits(case: GqaCase, generator: torch.Generator) -> torch.Tensor | None:
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
