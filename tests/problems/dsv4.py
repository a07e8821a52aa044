"""Problems of DeepSeek-V4's sparse MLA over two pools: their facts, tensors and float64 results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import mlagen
from mlagen.families.mla.two_pools import FORMATS as KV_FORMATS
from mlagen.runtime.device import arch_of_device
from mlagen.settings import current_settings
from mlagen.spec.dtype import DType
from mlagen.spec.mla.sm90 import mla_sm90_kernel
from mlagen.spec.mla.variant import MlaVariant
from tests.problems.dsv4_rows import (
    FORMATS,
    NAN_CODE,
    Bytes,
    Pages,
    decoded,
    empty_pool,
    random_rows,
)
from tests.problems.entry_points import EntryPoint
from tests.problems.problem import POISON, Case, Problem
from tests.problems.reference import Attention, attend, joined

_ELEMENTS = 512

# Sinks ``[heads]`` by name, from random numbers.
SINKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "random": lambda random: random * 3,
    "zero": torch.zeros_like,
    "none in some": lambda random: random.where(random > 0, -math.inf),
    "all none": lambda random: torch.full_like(random, -math.inf),
    "infinite in some": lambda random: random.where(random > 0, math.inf),
    "large": lambda random: random * 1e4,
    "NaN in the first": lambda random: random.index_fill(0, torch.tensor([0]), math.nan),
}


@dataclass(frozen=True, kw_only=True)
class Dsv4Case(Case):
    """The facts of a problem; ``seq_lens`` are the lengths of the first list, as given."""

    kv_cache_format: str = "fp8"
    heads: int = 16
    score_scale: float = _ELEMENTS**-0.5
    q_len: int = 0  # of a query [batch, q_len, heads, 512]; 0: [tokens, heads, 512]
    top_k: int = 128
    swa: Pages = field(default_factory=Pages)
    extra_lens: tuple[int, ...] | None = None  # of the second list; None: no second pool
    extra_top_k: int = 128
    extra: Pages = field(default_factory=Pages)
    shares_pool: bool = False  # the second pool is the first
    cache_layout: str = "3-D"  # or HND, NHD
    lists: str = ""  # "[T, 1, K]"; else as the query
    list_stride: int = 0  # elements between lists; 0: the width
    entries: str = "mixed"  # or "valid", "-1 first", "-1 in the middle", "-1 last", "-1", "invalid"
    sizes: str = "alike"  # of the numbers of tokens; see random_rows()
    nonfinite: str = ""  # "code", "scale", "rope" of a token, or "head" of a query token
    sinks: str = ""  # of SINKS

    @property
    def lens(self) -> tuple[int, ...]:
        """Query tokens of each sequence: a list is a sequence."""
        return (1,) * len(self.seq_lens)

    @property
    def variant(self) -> MlaVariant:
        """The variant of the kernels."""
        return MlaVariant(
            query_dtype=DType.BF16,
            kv_dtype=KV_FORMATS[self.kv_cache_format],
            qk_rope_head_dim=0,
            page_size=0,
            lookup="two_pools",
        )

    def build(self, device: str) -> Dsv4Problem:
        """Return the tensors on ``device`` and the data for checking a result."""
        return _build(self, device)


@dataclass(frozen=True, kw_only=True)
class Dsv4Problem(Problem):
    """The tensors of a case, and the numbers that each query token attends to."""

    case: Dsv4Case
    swa_kv_cache: torch.Tensor
    compressed_kv_cache: torch.Tensor | None
    extra_indices: torch.Tensor | None
    extra_lens: torch.Tensor | None
    rows: list[torch.Tensor] = field(repr=False)  # float64 [n, 512] on the CPU
    counts: list[torch.Tensor] = field(repr=False)  # [n]: how often each is listed

    math_dtype = out_dtype = torch.bfloat16

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the query."""
        return tuple(self.query.shape)

    def poison(self, seq: int, position: int) -> None:
        """Not of this problem: a token may be in several lists."""
        raise NotImplementedError

    def sees(self, seq: int, index: int, position: int) -> bool:
        """Return whether the first list of a query token has a position."""
        return index == 0 and position < self.case.seq_lens[seq]

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Return the keyword arguments of ``trtllm_batch_decode_sparse_mla_dsv4``."""
        case = self.case
        workspace = torch.empty(64 << 20, dtype=torch.uint8, device=self.device)
        if workspace.is_cuda:  # the CPU backend does not touch it
            workspace.fill_(POISON)
        arguments: dict[str, Any] = {
            "query": self.query,
            "swa_kv_cache": self.swa_kv_cache,
            "workspace_buffer": workspace,
            "sparse_indices": self.block_tables,
            "swa_topk_lens": self.seq_lens,
            "bmm1_scale": case.score_scale,
            "bmm2_scale": case.output_scale,
            "sinks": self.sinks,
            "kv_layout": "HND" if case.cache_layout == "3-D" else case.cache_layout,
            "kv_cache_format": case.kv_cache_format,
        }
        if self.compressed_kv_cache is not None:
            arguments |= {
                "compressed_kv_cache": self.compressed_kv_cache,
                "extra_sparse_indices": self.extra_indices,
                "extra_sparse_topk_lens": self.extra_lens,
            }
        return arguments | changes

    @property
    def _score_sums(self) -> tuple[tuple[int, int], ...]:
        """Dims of each FP8 score accumulation of an sm90 kernel, and its MMA steps."""
        if self.device.type != "cuda" or current_settings().mla_kernel == "sm80":
            return ()
        arch = arch_of_device(self.device.index or 0)
        if mla_sm90_kernel(arch, self.case.variant, 1, "auto") is None:
            return ()
        row = FORMATS[self.case.kv_cache_format][0]
        # The query in two terms, 32 elements a step.
        return ((row.group, row.group // 16),) * (row.codes // row.group)

    def expected(self) -> Attention:
        """Return the float64 result: out ``[tokens, heads, 512]`` and LSE ``[tokens, heads]``."""
        case, sinks = self.case, None if self.sinks is None else self.sinks.cpu()
        query = self.query.cpu().view(-1, case.heads, _ELEMENTS)
        return joined(
            [
                attend(
                    own,
                    rows,
                    rows,
                    score_scale=case.score_scale,
                    output_scale=case.output_scale,
                    sinks=sinks,
                    # A token that is listed n times has n times the weight, rounded alike.
                    bias=counts.log()[None],
                    score_sums=self._score_sums,
                )
                for own, rows, counts in zip(query, self.rows, self.counts, strict=True)
            ]
        )


@dataclass(frozen=True, kw_only=True)
class _Lists:
    """The lists of a pool, and the entries of each that count."""

    entries: torch.Tensor  # int32 [tokens, width]
    named: list[list[int]]


def _build(case: Dsv4Case, device: str) -> Dsv4Problem:
    generator = torch.Generator().manual_seed(case.seed)
    swa_row, extra_row = FORMATS[case.kv_cache_format]
    is_inline = "inline" in case.kv_cache_format
    pools = [empty_pool(swa_row, case.swa, is_inline=is_inline)]
    lists = [_lists(case, case.seq_lens, case.top_k, pools[0], generator)]
    if case.extra_lens is not None:
        extra = empty_pool(extra_row, case.extra, is_inline=is_inline)
        pools.append(pools[0] if case.shares_pool else extra)
        lists.append(_lists(case, case.extra_lens, case.extra_top_k, pools[1], generator))
    if case.shares_pool:
        numbers = [_fill(case, pools[0], [*lists[0].named, *lists[1].named], generator)] * 2
    else:
        pairs = zip(pools, lists, strict=True)
        numbers = [_fill(case, pool, own.named, generator) for pool, own in pairs]
    rows, counts = [], []
    for token in range(len(case.seq_lens)):
        seen: Counter[tuple[int, int]] = Counter()
        for which, own in enumerate(lists):
            pool = 0 if case.shares_pool else which
            seen.update((pool, entry) for entry in own.named[token])
        own_rows = [numbers[pool][entry] for pool, entry in seen]
        rows.append(torch.stack(own_rows) if seen else torch.zeros(0, _ELEMENTS).double())
        counts.append(torch.tensor(list(seen.values())).double())
    sinks = torch.randn(case.heads, generator=generator)
    views = [pool.view(device, case.cache_layout) for pool in pools[:1]]
    if case.extra_lens is not None:
        views.append(views[0] if case.shares_pool else pools[1].view(device, case.cache_layout))
    return Dsv4Problem(
        case=case,
        query=_query(case, generator).to(device),
        block_tables=_as_given(case, lists[0].entries).to(device),
        seq_lens=_lengths(case, case.seq_lens).to(device),
        sinks=SINKS[case.sinks](sinks).to(device) if case.sinks else None,
        cum_seq_lens_q=None,
        swa_kv_cache=views[0],
        compressed_kv_cache=views[1] if len(views) > 1 else None,
        extra_indices=_as_given(case, lists[1].entries).to(device) if len(lists) > 1 else None,
        extra_lens=_lengths(case, case.extra_lens).to(device) if case.extra_lens else None,
        rows=rows,
        counts=counts,
    )


def _query(case: Dsv4Case, generator: torch.Generator) -> torch.Tensor:
    shape = (len(case.seq_lens), case.heads, _ELEMENTS)
    query = torch.randn(shape, generator=generator) * case.query_magnitude
    if case.nonfinite == "head":
        query[0, case.heads // 2, 7] = math.nan
    return _leading(case, query.to(torch.bfloat16))


def _leading(case: Dsv4Case, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[tokens, ...]`` with the leading dimensions of the query."""
    return tensor.view(-1, case.q_len, *tensor.shape[1:]) if case.q_len else tensor


def _lengths(case: Dsv4Case, lengths: tuple[int, ...]) -> torch.Tensor:
    return _leading(case, torch.tensor(lengths, dtype=torch.int32))


def _as_given(case: Dsv4Case, entries: torch.Tensor) -> torch.Tensor:
    """Return lists as a slice of wider rows, which name bytes of poison, in the form of a call."""
    tokens, width = entries.shape
    wide = torch.zeros(tokens, max(width, case.list_stride), dtype=torch.int32)
    wide[:, :width] = entries
    given = wide[:, None] if case.lists == "[T, 1, K]" else _leading(case, wide)
    return given[..., :width]


def _lists(
    case: Dsv4Case,
    lengths: tuple[int, ...],
    width: int,
    pool: Bytes,
    generator: torch.Generator,
) -> _Lists:
    """Return random lists over some tokens of a pool; what is past a length names any token."""
    size, count = pool.pages.page_size, pool.pages.count
    slots = torch.randperm(size * count, generator=generator)[:96].tolist()
    chosen = {0, size * count - 1, *slots}  # the first and the last token of the pool among them
    places = torch.tensor([pool.entry(*divmod(slot, size)) for slot in sorted(chosen)])
    entries = places[torch.randint(0, len(places), (len(lengths), width), generator=generator)]
    # All that the lengths do not reach is poison, unless another list names it.
    invalid, named = pool.invalid_entries(), []
    for token, length in enumerate(lengths):
        n = min(max(length, 0), width)
        is_invalid = _invalid_places(case.entries, n, generator)
        kinds = [-1] if case.entries.startswith("-1") else invalid
        at = is_invalid.nonzero().flatten().tolist()
        for nth, column in enumerate(at):
            entries[token, column] = kinds[(nth + token) % len(kinds)]
        named.append(entries[token, :n][~is_invalid].tolist())
    return _Lists(entries=entries.to(torch.int32), named=named)


def _invalid_places(kind: str, n: int, generator: torch.Generator) -> torch.Tensor:
    third = (n + 2) // 3
    position = torch.arange(n)
    if kind == "mixed":
        return torch.rand(n, generator=generator) < 0.2
    if kind == "-1 first":
        return position < third
    if kind == "-1 in the middle":
        return (position >= third) & (position < 2 * third)
    if kind == "-1 last":
        return position >= n - third
    return torch.full((n,), kind != "valid")


def _fill(
    case: Dsv4Case, pool: Bytes, named: list[list[int]], generator: torch.Generator
) -> dict[int, torch.Tensor]:
    """Store random tokens at all entries that count, and return their numbers."""
    row = pool.row
    entries = list(dict.fromkeys(entry for own in named for entry in own))
    data, scales = random_rows(row, len(entries), case.sizes, generator)
    if entries and case.nonfinite == "code":
        data[0, 5] = NAN_CODE
    elif entries and case.nonfinite == "scale":
        scales[0, -1] = 0xFF if row.scale == "ue8m0" else NAN_CODE
    elif entries and case.nonfinite == "rope":
        data[0, -2:] = POISON
    for entry, own_data, own_scales in zip(entries, data, scales, strict=True):
        pool.store(entry, own_data, own_scales)
    return dict(zip(entries, decoded(row, data, scales), strict=True))


DSV4 = EntryPoint(
    name="dsv4",
    function=mlagen.mla.trtllm_batch_decode_sparse_mla_dsv4,
    case=Dsv4Case,
    arguments=Dsv4Problem.arguments,
    names={
        **{name: name for name in ("query", "sinks", "out", "lse")},
        "block_tables": "sparse_indices",
        "seq_lens": "swa_topk_lens",
        "score_scale": "bmm1_scale",
        "value_scale": "bmm2_scale",
    },
)


def decode_dsv4(problem: Dsv4Problem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE of a call."""
    arguments = problem.arguments(return_lse=True, **changes)
    result = mlagen.mla.trtllm_batch_decode_sparse_mla_dsv4(**arguments)
    assert isinstance(result, tuple)
    return result
