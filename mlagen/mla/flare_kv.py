"""KV operands of :func:`mlagen.mla.flare.flare_mla_decoding`: a paged cache or a dense tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from mlagen.families.common.arguments import (
    INT32_MAX,
    require,
    require_dims,
    require_index,
    require_shape,
    require_tensor,
)
from mlagen.families.mla.args import MlaArgNames
from mlagen.families.mla.problem import pages_of


@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """A paged KV cache that contains the new tokens, with lengths that exclude them.

    Parameters
    ----------
    blocks : [pages, page_size, 576]
        Of the query's dtype, with an optional axis of size 1 before or after ``page_size``, and any
        strides that are multiples of 16 bytes. Of width 640 with ``per_token_scale_rope_aware``.
    block_table : int32 or uint32 [batch, max_pages]
        Page ids of each request.
    cache_lengths : int32 or uint32 [batch]
        Tokens of each request before the new ones.
    scales : fp32 [pages, page_size], or with trailing axes of size 1
        One for each token, with ``per_token_scale_rope_aware``.
    """

    blocks: torch.Tensor
    block_table: torch.Tensor
    cache_lengths: torch.Tensor
    scales: torch.Tensor | None = None


_DENSE_NAMES = MlaArgNames(
    query="q",
    query_rope="q",
    kv_cache="k",
    cum_seq_lens_q="valid_length",
    out="output",
    bmm1_scale="scale",
)
_PAGED_NAMES = _DENSE_NAMES._replace(
    kv_cache="k.blocks",
    block_tables="k.block_table",
    seq_lens="k.cache_lengths",
    kv_scales="k.scales",
)


class Keys(NamedTuple):
    """A paged KV cache with its lengths."""

    blocks: torch.Tensor
    block_table: torch.Tensor
    cached: torch.Tensor | None = None  # int32 [batch], excluding the new tokens
    total: int = 0  # including the new tokens, if cached is None
    scales: torch.Tensor | None = None
    width: int = 0  # capacity of a request in tokens
    names: MlaArgNames = _PAGED_NAMES


def paged_keys(k: PagedKVCache, kv_scales: torch.Tensor | None) -> Keys:
    """Return the KV operands of a paged cache."""
    blocks = require_tensor(k.blocks, "k.blocks")
    require_dims(blocks, "k.blocks", (3, 4))
    table = require_tensor(k.block_table, "k.block_table")
    require_dims(table, "k.block_table", (2,))
    require_index(table, "k.block_table", blocks.device)
    lengths = require_tensor(k.cache_lengths, "k.cache_lengths")
    require_index(lengths, "k.cache_lengths", blocks.device)
    require_shape(lengths, "k.cache_lengths", ((table.shape[0],),), "batch of k.block_table")
    require(
        kv_scales is None, "kv_scales", "None with a PagedKVCache, which has scales", "a tensor"
    )
    return Keys(
        blocks=blocks,
        block_table=table,
        cached=as_int32(lengths),
        scales=None if k.scales is None else _squeezed_scales(k.scales, "k.scales"),
        width=table.shape[1] * pages_of(blocks).shape[1],
    )


def positions_of(k: object) -> int:
    """Return the capacity of all block tables in tokens; 0 for other objects."""
    if isinstance(k, PagedKVCache):
        blocks, table = k.blocks, k.block_table
        if isinstance(blocks, torch.Tensor) and isinstance(table, torch.Tensor):
            return table.numel() * blocks.shape[1:-1].numel()
    return k.shape[:2].numel() if isinstance(k, torch.Tensor) else 0


def keys_without_table(k: torch.Tensor | PagedKVCache, kv_scales: torch.Tensor | None) -> Keys:
    """Return KV operands with an empty block table, for a cheap check of the call."""
    if isinstance(k, PagedKVCache):
        keys = paged_keys(k, kv_scales)
        return keys._replace(block_table=keys.block_table[:, :0])
    return dense_keys(k, kv_scales, columns=0)


def dense_keys(k: torch.Tensor, kv_scales: torch.Tensor | None, columns: int | None = None) -> Keys:
    """Return dense keys as pages of one token, so that the kernel does not depend on ``num_keys``.

    The block table has ``columns`` columns; ``num_keys`` if None.
    """
    require_dims(require_tensor(k, "k"), "k", (4,))
    batch, num_keys, kv_heads, _ = k.shape
    require(kv_heads == 1, "k.shape[2]", "1 (KV heads)", kv_heads)
    if kv_scales is not None:
        kv_scales = _squeezed_scales(kv_scales, "kv_scales")
        require_shape(kv_scales, "kv_scales", ((batch, num_keys),), "batch, num_keys of k")
        kv_scales = kv_scales.reshape(-1, 1)
    total = batch * num_keys
    require(total <= INT32_MAX, "k.shape", f"{INT32_MAX} keys or fewer in all", list(k.shape))
    columns = num_keys if columns is None else columns
    rows = torch.arange(batch * columns, dtype=torch.int32, device=k.device)
    blocks = _view_as_pages(k, total)
    if blocks is None:  # the strides allow no view: a contiguous copy
        blocks = k.reshape(total, 1, k.shape[3]) if columns else k.new_empty((0, 1, k.shape[3]))
        kv_scales = kv_scales if columns or kv_scales is None else kv_scales[:0]
    return Keys(
        blocks=blocks,
        block_table=rows.view(batch, columns),
        total=num_keys,
        scales=kv_scales,
        width=num_keys,
        names=_DENSE_NAMES,
    )


def as_int32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of 32-bit integers as int32."""
    return tensor if tensor.dtype is torch.int32 else tensor.view(torch.int32)


def _view_as_pages(k: torch.Tensor, total: int) -> torch.Tensor | None:
    """Return a view of dense keys as pages of one token, if the strides allow it."""
    try:
        return k.view(total, 1, k.shape[3])
    except RuntimeError:
        return None


def _squeezed_scales(scales: torch.Tensor, argument: str) -> torch.Tensor:
    """Return scales ``[pages, page_size]``, without trailing axes of size 1."""
    scales = require_tensor(scales, argument)
    while scales.dim() > 2 and scales.shape[-1] == 1:
        scales = scales.squeeze(-1)
    require_dims(scales, argument, (2,))
    return scales
