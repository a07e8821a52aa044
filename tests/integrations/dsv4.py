"""Caches of DeepSeek-V4 for the tests of the servers' plugins, and FlashMLA's decode in float64."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.attended import attended
from tests.problems.dsv4_rows import V4, Bytes, Pages, decoded, empty_pool, random_rows

HEADS, PADDED, SCALE = 8, 64, 512**-0.5
DATA, ROW = V4.data, V4.width  # bytes


def cache(pages: int, page_size: int, seed: int, gap: int = 0) -> torch.Tensor:
    """Return pages of random rows, ``[pages, page_size, 584]``, with NaN in what no row has.

    ``gap`` bytes more than the alignment to 576 lie between the pages.
    """
    pool = _pool(pages, page_size, -(-page_size * ROW // DATA) * DATA + gap)
    generator = torch.Generator().manual_seed(seed)
    rows = zip(*random_rows(V4, pages * page_size, "alike", generator), strict=True)
    for entry, (data, scales) in enumerate(rows):
        pool.store(entry, data, scales)
    return pool.view("cpu", "3-D")


def _pool(pages: int, page_size: int, page_bytes: int) -> Bytes:
    return empty_pool(
        V4, Pages(count=pages, page_size=page_size, page_bytes=page_bytes), is_inline=False
    )


def rows_of(pages: torch.Tensor) -> torch.Tensor:
    """Return the tokens of a cache ``[pages, page_size, 1, 584]`` in float64."""
    count, page_size = pages.shape[:2]
    pool = _pool(count, page_size, pages.stride(0))
    stored = pages.view(torch.uint8)
    memory = stored.as_strided((count * pages.stride(0),), (1,))
    starts = [pool.starts(entry) for entry in range(count * page_size)]
    data = torch.stack([memory[at : at + DATA] for at, _ in starts])
    scales = torch.stack([memory[at : at + V4.codes // V4.group] for _, at in starts])
    return decoded(V4, data, scales)


def flash_mla(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor,
    softmax_scale: float,
    attn_sink: torch.Tensor,
    extra_k_cache: torch.Tensor | None,
    extra_indices_in_kvcache: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    out: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute what FlashMLA does with the arguments of a server."""
    pools = [(k_cache, indices, topk_length)]
    if extra_k_cache is not None:
        assert extra_indices_in_kvcache is not None
        assert extra_topk_length is not None
        pools.append((extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
    tokens = [(rows_of(pages), *lists) for pages, *lists in pools]
    result = torch.zeros(q.shape, dtype=torch.float64)
    for at, query in enumerate(q[:, 0].double()):
        seen = [rows[list_of(lists[at, 0], lengths[at])] for rows, lists, lengths in tokens]
        values, lse = attended(query, torch.cat(seen), softmax_scale, 512)
        result[at, 0] = values * torch.sigmoid(lse - attn_sink.double())[:, None]
    if out is None:
        return result, None
    return out.copy_(result), None


def list_of(entries: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Return the tokens of a list that FlashMLA looks at: -1 is none."""
    looked_at = entries[: int(length)].long()
    return looked_at[looked_at >= 0]


def queries(tokens: int, heads: int = HEADS) -> torch.Tensor:
    """Return queries with NaN in the heads that pad them."""
    generator = torch.Generator().manual_seed(5)
    padded = torch.full((tokens, PADDED, 512), torch.nan).bfloat16()
    padded[:, :heads] = torch.randn(tokens, heads, 512, generator=generator).bfloat16() * 3
    return padded


def sinks(heads: int = HEADS) -> torch.Tensor:
    """Return sinks, minus infinity for the heads that pad a query."""
    values = torch.full((PADDED,), -torch.inf)
    values[:heads] = torch.linspace(-2, 2, heads)
    return values
