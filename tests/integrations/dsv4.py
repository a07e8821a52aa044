"""Caches of DeepSeek-V4 for the tests of the servers' plugins, and FlashMLA's decode in float64."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.attended import E4M3, attended

HEADS, PADDED, SCALE = 8, 64, 512**-0.5
LATENT, DATA, ROW = 448, 576, 584  # bytes; the rope dims end the data, the scales follow a page's


def cache(pages: int, page_size: int, seed: int, gap: int = 0) -> torch.Tensor:
    """Return pages of random rows, ``[pages, page_size, 584]``, with NaN in what no row has.

    ``gap`` bytes more than the alignment to 576 lie between the pages.
    """
    generator = torch.Generator().manual_seed(seed)
    stride = -(-page_size * ROW // DATA) * DATA + gap
    stored = torch.full((pages, stride), 0xFF, dtype=torch.uint8)
    data = stored[:, : DATA * page_size].view(pages, page_size, DATA)
    latents = torch.randn(pages, page_size, LATENT, generator=generator)
    data[..., :LATENT] = latents.to(E4M3).view(torch.uint8)
    rope = torch.randn(pages, page_size, 64, generator=generator).bfloat16()
    data[..., LATENT:] = rope.view(torch.uint8)
    scales = stored[:, DATA * page_size : ROW * page_size].view(pages, page_size, ROW - DATA)
    scales[..., :7] = torch.randint(124, 129, (pages, page_size, 7), generator=generator)
    return stored.as_strided((pages, page_size, ROW), (stride, ROW, 1))


def rows_of(pages: torch.Tensor) -> torch.Tensor:
    """Return the tokens of a cache ``[pages, page_size, 1, 584]`` in float64."""
    count, page_size = pages.shape[:2]
    stored = pages.view(torch.uint8)
    whole = stored.as_strided((count, page_size * ROW), (stored.stride(0), 1))
    data = whole[:, : page_size * DATA].reshape(-1, DATA)
    codes = data[:, :LATENT].contiguous().view(E4M3).double()
    rope = data[:, LATENT:].contiguous().view(torch.bfloat16).double()
    scales = whole[:, page_size * DATA :].reshape(-1, ROW - DATA)[:, :7].double() - 127
    return torch.cat([codes * scales.exp2().repeat_interleave(64, dim=1), rope], dim=1)


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
