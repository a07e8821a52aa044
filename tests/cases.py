"""Named MLA decode problems, with poison in everything that must not be read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.reference import (
    Attention,
    assert_close,
    attend,
    lse_tolerance,
    output_tolerance,
    stack,
)

# What stands in the block table past the last page of a request.
WILD_PAGES = (-1, 2**31 - 1, -(2**31), 1_000_000)


@dataclass(frozen=True, kw_only=True)
class MlaCase:
    """One problem; ``q_lens`` makes it ragged, else every request has ``q_len`` query tokens."""

    name: str
    seq_lens: tuple[int, ...]
    heads: int = 16
    q_len: int = 1
    q_lens: tuple[int, ...] | None = None
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    score_scale: float = 192**-0.5
    output_scale: float = 1.0
    with_sinks: bool = False
    query_magnitude: float = 1.0
    spare_pages: int = 3  # columns of the block table past the longest request
    cache_form: str = "3-D"  # "[P,1,ps,d]", "[P,ps,1,d]" or "strided" too
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def build(self, device: str) -> MlaProblem:
        """Return tensors on ``device`` and what is needed to check a result."""
        return _build(self, device)


@dataclass(frozen=True, kw_only=True)
class MlaProblem:
    """The tensors of a case, and the tokens of each request in order."""

    case: MlaCase
    query: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    sinks: torch.Tensor | None
    cum_seq_lens_q: torch.Tensor | None
    tokens: list[torch.Tensor] = field(repr=False)  # [seq_len, head_dim_qk] of each request, CPU

    @property
    def q_lens(self) -> tuple[int, ...]:
        """Query tokens of each request."""
        return self.case.q_lens or (self.case.q_len,) * len(self.case.seq_lens)

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Return the keyword arguments of ``trtllm_batch_decode_with_kv_cache_mla``."""
        device = self.query.device
        arguments: dict[str, Any] = {
            "query": self.query,
            "kv_cache": self.kv_cache,
            "workspace_buffer": torch.full((64 << 20,), 0xFF, dtype=torch.uint8, device=device),
            "qk_nope_head_dim": 128,
            "kv_lora_rank": self.case.kv_lora_rank,
            "qk_rope_head_dim": self.case.qk_rope_head_dim,
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "max_seq_len": max(self.case.seq_lens, default=0),
            "bmm1_scale": self.case.score_scale,
            "bmm2_scale": self.case.output_scale,
            "sinks": self.sinks,
        }
        if self.cum_seq_lens_q is not None:
            arguments["cum_seq_lens_q"] = self.cum_seq_lens_q
            arguments["max_q_len"] = max(self.q_lens)
        return arguments | changes

    def expected(self) -> Attention:
        """Return what float64 gives: out ``[tokens, heads, dim]`` and LSE ``[tokens, heads]``."""
        rows = self.query.reshape(-1, *self.query.shape[-2:]).cpu()
        sinks = self.sinks.cpu() if self.sinks is not None else None
        parts = []
        position = 0
        for tokens, q_len in zip(self.tokens, self.q_lens, strict=True):
            for index in range(q_len):
                visible = max(0, len(tokens) - q_len + index + 1)
                seen = tokens[:visible]
                part = attend(
                    rows[position],
                    seen,
                    seen[:, : self.case.kv_lora_rank],
                    score_scale=self.case.score_scale,
                    output_scale=self.case.output_scale,
                    sinks=sinks,
                )
                parts.append(part)
                position += 1
        return stack(parts)

    def check(
        self, out: torch.Tensor, lse: torch.Tensor | None = None, *, natural: bool = False
    ) -> None:
        """Fail unless every element of ``out``, and of ``lse`` if given, is right."""
        expected = self.expected()
        tolerance = output_tolerance(out.dtype, expected)
        assert_close(out.reshape(expected.out.shape), expected.out, tolerance, "out")
        if lse is not None:
            factor = math.log(2) if natural else 1.0
            wanted = expected.lse * factor
            assert_close(lse.reshape(wanted.shape), wanted, lse_tolerance(out.dtype), "lse")


def _build(case: MlaCase, device: str) -> MlaProblem:
    generator = torch.Generator().manual_seed(case.seed)
    width = case.kv_lora_rank + case.qk_rope_head_dim
    used = [-(-length // case.page_size) for length in case.seq_lens]
    pages = sum(used) + 4  # some belong to nobody
    order = torch.randperm(pages, generator=generator)
    cache = torch.full((pages, case.page_size, width), math.nan, dtype=case.dtype)
    tables = torch.tensor(WILD_PAGES).repeat(len(used), max(used, default=0) + case.spare_pages)
    tables = tables[:, : max(used, default=0) + case.spare_pages].to(torch.int32)
    tokens = []
    first = 0
    for request, (length, count) in enumerate(zip(case.seq_lens, used, strict=True)):
        ids = order[first : first + count]
        first += count
        content = torch.randn(length, width, generator=generator).to(case.dtype)
        slots = torch.full((count * case.page_size, width), math.nan, dtype=case.dtype)
        slots[:length] = content
        cache[ids] = slots.view(count, case.page_size, width)
        tables[request, :count] = ids.to(torch.int32)
        tokens.append(content)

    lens = case.q_lens or (case.q_len,) * len(case.seq_lens)
    query = torch.randn(sum(lens), case.heads, width, generator=generator) * case.query_magnitude
    query = query.to(case.dtype)
    cumulative = None
    if case.q_lens is None:
        query = query.view(len(lens), case.q_len, case.heads, width)
    else:
        ends = torch.tensor((0, *case.q_lens)).cumsum(0)
        cumulative = ends.to(torch.int32).to(device)
    sinks = torch.randn(case.heads, generator=generator) * 3 if case.with_sinks else None
    return MlaProblem(
        case=case,
        query=query.to(device),
        kv_cache=_in_form(cache.to(device), case.cache_form),
        block_tables=tables.to(device),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32).to(device),
        sinks=sinks.to(device) if sinks is not None else None,
        cum_seq_lens_q=cumulative,
        tokens=tokens,
    )


def _in_form(cache: torch.Tensor, form: str) -> torch.Tensor:
    pages, page_size, width = cache.shape
    if form == "[P,1,ps,d]":
        return cache.unsqueeze(1)
    if form == "[P,ps,1,d]":
        return cache.unsqueeze(2)
    if form == "strided":
        # Rows padded to 640 elements and pages with a spare row, all of it NaN.
        wide = torch.full(
            (pages, page_size + 1, width + 64), math.nan, dtype=cache.dtype, device=cache.device
        )
        wide[:, :page_size, :width] = cache
        return wide[:, :page_size, :width]
    return cache
