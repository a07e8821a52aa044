"""Input tensors of a case: several sets of equal shapes that the calls rotate through."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlagen.spec.dtype import DType

from .cases import QK_ROPE_HEAD_DIM, Case
from .formats import TORCH_DTYPES, Stored, random_cache

# Softmax scales by rope part, from the head dim before weight absorption: 128 + 64 in DeepSeek-V3,
# 256 in GLM-5.3-Flash.
_MLA_SCALES = {QK_ROPE_HEAD_DIM: 192**-0.5, 0: 256**-0.5}

# FlashInfer's XQA requires block tables that cover a multiple of this many tokens; the other
# kernels accept wider tables.
_TABLE_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of a case; only ``queries``, ``keys`` and ``values`` differ between sets.

    ``queries[i]`` is ``[batch, q_len, heads, head_dim_qk]``, ``keys[i]`` is ``[pages, page_size,
    kv_heads, row]``, and ``values[i]`` the same, in MLA the keys themselves.
    """

    case: Case
    queries: list[torch.Tensor]
    keys: list[Stored]
    values: list[Stored]
    block_tables: torch.Tensor  # int32[batch, max_pages]
    seq_lens: torch.Tensor  # int32[batch]
    scale: float
    topk_indices: torch.Tensor | None = None  # int32[batch, q_len, top_k], slots of the cache

    @property
    def sets(self) -> int:
        """Number of sets."""
        return len(self.queries)

    @property
    def max_seq_len(self) -> int:
        """Length of the longest request."""
        return max(self.case.seq_lens)

    @property
    def pages(self) -> list[int]:
        """Number of pages of each request."""
        return [-(-length // self.case.page_size) for length in self.case.seq_lens]


def make_inputs(case: Case, sets: int, device: str) -> Inputs:
    """Return ``sets`` normally distributed inputs with pages in random order."""
    generator = torch.Generator(device).manual_seed(0)
    counts = [-(-length // case.page_size) for length in case.seq_lens]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    run = -(-_TABLE_TOKENS // case.page_size)
    tables = torch.zeros(case.batch, -(-max(counts) // run) * run, dtype=torch.int32)
    for request, pages in enumerate(torch.split(order, counts)):
        tables[request, : len(pages)] = pages

    def random(dtype: DType, *shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return numbers.to(TORCH_DTYPES[dtype])

    page = (sum(counts), case.page_size, case.kv_heads)
    queries, keys, values = [], [], []
    for _ in range(sets):
        queries.append(random(case.dtype, case.batch, case.q_len, case.heads, case.head_dim_qk))
        keys.append(random_cache(case.kv_dtype, (*page, case.head_dim_qk), generator))
        is_mla = case.family == "mla"
        shape = (*page, case.head_dim_vo)
        values.append(keys[-1] if is_mla else random_cache(case.kv_dtype, shape, generator))
    tables = tables.to(device)
    return Inputs(
        case=case,
        queries=queries,
        keys=keys,
        values=values,
        block_tables=tables,
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        scale=(
            _MLA_SCALES[case.qk_rope_head_dim] if case.family == "mla" else case.head_dim_qk**-0.5
        ),
        topk_indices=_topk_indices(case, tables, generator) if case.top_k else None,
    )


def _topk_indices(case: Case, tables: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return slots of random tokens, each at most once for a query token."""
    rows = []
    for request, seq_len in enumerate(case.seq_lens):
        for _ in range(case.q_len):
            order = torch.randperm(seq_len, generator=generator, device=tables.device)
            tokens = order[: case.top_k]
            pages = tables[request, tokens // case.page_size]
            rows.append(pages * case.page_size + tokens % case.page_size)
    return torch.stack(rows).int().view(case.batch, case.q_len, case.top_k)
