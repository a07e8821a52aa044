"""Query and KV operands of :func:`mlagen.mla.flare.flare_mla_decoding`.

All computations run on the tensors' device, without synchronization unless ``MLAGEN_CHECK=1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from mlagen.families.common.arguments import (
    INT32_MAX,
    reject,
    require,
    require_dims,
    require_index,
    require_ints,
    require_shape,
    require_tensor,
)
from mlagen.families.common.device_checks import check_seq_lens, query_lengths, require_no_capture
from mlagen.families.mla.args import MlaArgNames
from mlagen.families.mla.problem import pages_of
from mlagen.mla.masks import QueryRows
from mlagen.settings import current_settings


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
    try:
        blocks = k.view(total, 1, k.shape[3])
    except RuntimeError:  # the strides allow no view: a contiguous copy
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


def _squeezed_scales(scales: torch.Tensor, argument: str) -> torch.Tensor:
    """Return scales ``[pages, page_size]``, without trailing axes of size 1."""
    scales = require_tensor(scales, argument)
    while scales.dim() > 2 and scales.shape[-1] == 1:
        scales = scales.squeeze(-1)
    require_dims(scales, argument, (2,))
    return scales


class Queries(NamedTuple):
    """The query and its metadata, as kernel arguments."""

    query: torch.Tensor  # [batch, q_len, heads, d], or ragged
    cu_seqlens_q: torch.Tensor | None
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_q_len: int | None
    rows: QueryRows | None  # for materialized masks

    @property
    def computed(self) -> tuple[torch.Tensor, ...]:
        """The tensors that every call computes."""
        if self.max_q_len is None or self.cu_seqlens_q is None:
            return (self.seq_lens,)
        return self.seq_lens, self.cu_seqlens_q, self.block_table


def ragged_queries(
    q: torch.Tensor, keys: Keys, valid_length: torch.Tensor | None, *, needs_rows: bool
) -> Queries:
    """Return ragged queries; ``valid_length`` has the offsets of the requests."""
    batch, tokens = keys.block_table.shape[0], q.shape[0]
    offsets = _checked_lengths(valid_length, q, batch + 1, "batch of k + 1")
    if current_settings().checks_contents:
        require_no_capture(q)
        _check_cached(keys, query_lengths(offsets, "valid_length", tokens))
    require(batch > 0 or tokens == 0, "q.shape[0]", "0 (no requests)", tokens)
    return compute_ragged(q, keys, offsets, needs_rows=needs_rows)


def compute_ragged(
    q: torch.Tensor, keys: Keys, offsets: torch.Tensor, *, needs_rows: bool = False
) -> Queries:
    """Return ragged queries of checked arguments."""
    batch, tokens = keys.block_table.shape[0], q.shape[0]
    new = offsets.diff()
    seq_lens = _total(keys, new)
    rows = None
    if needs_rows:
        index = torch.arange(tokens, dtype=torch.int32, device=q.device)
        # Tokens after the last request belong to none; the clamp keeps their index in bounds.
        requests = torch.searchsorted(offsets[1:].contiguous(), index, right=True)
        requests = requests.clamp(max=max(0, batch - 1))
        positions = (seq_lens - offsets[1:])[requests] + index
        rows = _rows(requests, positions, q, keys)
    return Queries(q, offsets, seq_lens, keys.block_table, None, rows)


def padded_queries(
    q: torch.Tensor, keys: Keys, valid_length: torch.Tensor | None, *, needs_rows: bool
) -> Queries:
    """Return queries padded to ``q_len`` tokens; ``valid_length`` has the valid ones."""
    batch, q_len = keys.block_table.shape[0], q.shape[1]
    require(q.shape[0] == batch, "q.shape[0]", f"{batch} (batch of k)", q.shape[0])
    given = None
    if valid_length is not None or keys.cached is not None:
        given = _checked_lengths(valid_length, q, batch, "batch of q")
        if current_settings().checks_contents:
            require_no_capture(q)
            _check_cached(keys, _checked_new(given, q_len))
    return compute_padded(q, keys, given, needs_rows=needs_rows)


def compute_padded(
    q: torch.Tensor, keys: Keys, given: torch.Tensor | None, *, needs_rows: bool = False
) -> Queries:
    """Return padded queries of checked arguments; without ``given`` all tokens are valid."""
    batch, q_len = keys.block_table.shape[0], q.shape[1]
    if given is None:
        new = torch.full((batch,), q_len, dtype=torch.int32, device=q.device)
    else:
        new = given.clamp(0, q_len)
    seq_lens = _total(keys, new)
    rows = None
    if needs_rows:
        tokens = torch.arange(batch * q_len, dtype=torch.int64, device=q.device)
        requests = tokens // q_len
        rows = _rows(requests, (seq_lens - new)[requests] + tokens % q_len, q, keys)
    if given is None:
        return Queries(q, None, seq_lens, keys.block_table, None, rows)
    if q_len == 1:  # a request without its query token becomes empty
        return Queries(q, None, seq_lens * new, keys.block_table, None, rows)
    # The padding of each request becomes an empty request, whose rows are zeros.
    starts = torch.arange(batch, dtype=torch.int32, device=q.device) * q_len
    cu_seqlens_q = torch.stack([starts, starts + new], dim=1).flatten()
    cu_seqlens_q = torch.nn.functional.pad(cu_seqlens_q, (0, 1), value=batch * q_len)
    return Queries(
        query=q.flatten(0, 1),
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=torch.stack([seq_lens, torch.zeros_like(seq_lens)], dim=1).flatten(),
        block_table=keys.block_table.view(torch.int32).repeat_interleave(2, dim=0),
        max_q_len=q_len,
        rows=rows,
    )


def _checked_lengths(
    valid_length: torch.Tensor | None, q: torch.Tensor, count: int, why: str
) -> torch.Tensor:
    return as_int32(require_ints(valid_length, "valid_length", q.device, ((count,),), why))


def _checked_new(given: torch.Tensor, q_len: int) -> torch.Tensor:
    new = given.cpu().long()
    for request, tokens in enumerate(new.tolist()):
        if not 0 <= tokens <= q_len:
            reject(f"valid_length[{request}]", f"0 to {q_len} (q.shape[1])", tokens)
    return new


def _check_cached(keys: Keys, new: torch.Tensor) -> None:
    if keys.cached is None:
        return
    cached = check_seq_lens(keys.cached, keys.names.seq_lens, capacity=None, q_lens=None)
    for request, tokens in enumerate((cached + new).tolist()):
        if tokens > keys.width:
            rule = f"{keys.width} (capacity of its block table) or less with its new tokens"
            reject(f"{keys.names.seq_lens}[{request}]", rule, tokens)


def _total(keys: Keys, new: torch.Tensor) -> torch.Tensor:
    if keys.cached is None:
        return torch.full_like(new, keys.total)
    return keys.cached + new


def _rows(
    requests: torch.Tensor, positions: torch.Tensor, q: torch.Tensor, keys: Keys
) -> QueryRows:
    return QueryRows(
        requests=requests,
        positions=positions.long(),
        batch=keys.block_table.shape[0],
        heads=q.shape[-2],
        width=keys.width,
    )
