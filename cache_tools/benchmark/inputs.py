"""Input tensors of a case: several sets of equal shapes that the calls rotate through."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlagen.spec.dtype import DType

from .cases import Case

TORCH_DTYPES = {
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.E4M3: torch.float8_e4m3fn,
}

# Softmax scale of DeepSeek-V3: head dim 128 + 64 before weight absorption.
_MLA_SCALE = 192**-0.5

# FlashInfer's XQA requires block tables that cover a multiple of this many tokens; the other
# kernels accept wider tables.
_TABLE_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of a case; only ``queries``, ``keys`` and ``values`` differ between sets.

    ``queries[i]`` is ``[batch, q_len, heads, head_dim_qk]``, ``keys[i]`` is ``[pages, page_size,
    kv_heads, head_dim_qk]``, and ``values[i]`` the same with ``head_dim_vo``, in MLA a view of
    the keys.
    """

    case: Case
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    block_tables: torch.Tensor  # int32[batch, max_pages]
    seq_lens: torch.Tensor  # int32[batch]
    scale: float

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
        keys.append(random(case.kv_dtype, *page, case.head_dim_qk))
        is_mla = case.family == "mla"
        value = keys[-1][..., : case.head_dim_vo] if is_mla else None
        values.append(random(case.kv_dtype, *page, case.head_dim_vo) if value is None else value)
    return Inputs(
        case=case,
        queries=queries,
        keys=keys,
        values=values,
        block_tables=tables.to(device),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        scale=_MLA_SCALE if case.family == "mla" else case.head_dim_qk**-0.5,
    )
