"""Layout checks of lengths and block tables, or sparse top-k indices, of one MLA decode call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlagen.families.common.arguments import (
    check_token_stride,
    require,
    require_contiguous,
    require_dense_last_dim,
    require_dims,
    require_index,
    require_ints,
    require_shape,
    require_tensor,
    token_stride,
)
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.validate_query import QueryLayout


class TablesLayout(NamedTuple):
    """The layout of valid block tables or top-k indices."""

    max_pages: int  # of a request; with flat page ids, of all requests
    stride: int  # elements between block tables, or between rows of top-k indices
    values_offset: int  # bytes from a request's block table of keys to that of values


def check_lengths(args: MlaArgs) -> int:
    """Return the number of requests.

    Raises
    ------
    ArgumentError
        If the lengths break a rule.
    """
    name = args.names.seq_lens
    seq_lens = require_tensor(args.seq_lens, name)
    require_index(seq_lens, name, args.query.device)
    require_dims(seq_lens, name, (1,))
    require_contiguous(seq_lens, name)
    if args.cum_seq_lens_q is None:
        require_shape(seq_lens, name, ((args.query.shape[0],),), "batch of query")
    return seq_lens.shape[0]


def check_tables(args: MlaArgs, batch: int, query: QueryLayout) -> TablesLayout:
    """Return the layout of the block tables, or of the top-k indices with ``top_k``.

    Raises
    ------
    ArgumentError
        If they break a rule.
    """
    name = args.names.block_tables
    tables = require_tensor(args.block_tables, name)
    require_index(tables, name, args.query.device)
    if args.top_k_lens is not None:
        _check_top_k_lens(args, query.tokens)
    if args.top_k:
        return _check_topk_indices(args, tables, batch, query)
    if args.kv_indptr is not None:
        indptr_name, device = args.names.kv_indptr, args.query.device
        require_ints(args.kv_indptr, indptr_name, device, ((batch + 1,),), "batch + 1")
        require_dims(tables, name, (1,))
        require_contiguous(tables, name)
        return TablesLayout(max_pages=tables.shape[0], stride=0, values_offset=0)
    # Separate tables of keys and values need separate value storage.
    require_dims(tables, name, (2,) if args.value_cache is None else (2, 3))
    require_dense_last_dim(tables, name)
    require(tables.shape[0] == batch, f"{name}.shape[0]", f"{batch} (batch)", tables.shape[0])
    values_offset = 0
    if tables.dim() == 3:
        require(tables.shape[1] == 2, f"{name}.shape[1]", "2 (keys, values)", tables.shape[1])
        values_offset = tables.stride(1) * tables.element_size()
    return TablesLayout(
        max_pages=tables.shape[-1], stride=tables.stride(0), values_offset=values_offset
    )


def _check_topk_indices(
    args: MlaArgs, tables: torch.Tensor, batch: int, query: QueryLayout
) -> TablesLayout:
    name = args.names.block_tables
    require(
        args.kv_indptr is None,
        args.names.kv_indptr,
        "None with sparse_mla_top_k",
        "a tensor",
    )
    if query.q_len == 0:
        require_shape(tables, name, ((query.tokens, args.top_k),), "query tokens, sparse_mla_top_k")
        stride = tables.stride(0)
    else:
        expected = (batch, query.q_len, args.top_k)
        require_shape(tables, name, (expected,), "batch, q_len, sparse_mla_top_k")
        check_token_stride(tables, name)
        stride = token_stride(tables, query.q_len)
    require_dense_last_dim(tables, name)
    return TablesLayout(max_pages=0, stride=stride, values_offset=0)


def _check_top_k_lens(args: MlaArgs, tokens: int) -> None:
    name = args.names.top_k_lens
    require(args.top_k > 0, name, "None without sparse_mla_top_k", "a tensor")
    require_ints(args.top_k_lens, name, args.query.device, ((tokens,),), "query tokens")
