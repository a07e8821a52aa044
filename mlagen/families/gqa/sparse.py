"""Checks of grouped-query calls whose query tokens have block indices: sparse attention."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlagen.families.common.arguments import (
    require,
    require_contiguous,
    require_dense_last_dim,
    require_dims,
    require_dtype,
    require_index,
    require_ints,
    require_shape,
    require_tensor,
)
from mlagen.families.gqa.args import GqaArgs

MAX_TOKENS = 0x7FFF0000  # of a request, as in templates/common/paged_kv.cuh


class BlockIndices(NamedTuple):
    """The block indices of a call: how many a query token and KV head has, and their strides."""

    width: int = 0
    stride: int = 0
    head_stride: int = 0


def check_sparse(args: GqaArgs, tokens: int, kv_heads: int, head_dim_vo: int) -> BlockIndices:
    """Return the block indices of a call; without any, it is a dense one."""
    names, device = args.names, args.query.device
    if args.block_indices is None:
        return BlockIndices()
    head_dim = args.query.shape[-1]
    rule = f"{head_dim} ({names.key_cache}.shape[-1])"
    require(head_dim_vo == head_dim, f"{names.value_cache}.shape[-1]", rule, head_dim_vo)
    name = names.block_indices
    indices = require_tensor(args.block_indices, name)
    require_index(indices, name, device)
    if args.separate_page_ids:
        return _check_both(args, indices, tokens, kv_heads)
    require_dims(indices, name, (2, 3))
    *heads, rows, width = indices.shape
    if heads:
        require(heads[0] == kv_heads, f"{name}.shape[0]", f"{kv_heads} (KV heads)", heads[0])
    require(rows == tokens, f"{name}.shape[-2]", f"{tokens} (tokens of {names.query})", rows)
    count = width - args.has_index_counts
    columns = "2 columns (indices and their number)" if args.has_index_counts else "1 index"
    require(count >= 1, f"{name}.shape[-1]", f"{columns} or more", width)
    limit = MAX_TOKENS // args.sparse_block
    require(count <= limit, f"{name}.shape[-1]", f"{limit + args.has_index_counts} or less", width)
    require_dense_last_dim(indices, name)
    if args.token_to_req is not None:
        why = f"tokens of {names.query}"
        require_ints(args.token_to_req, names.token_to_req, device, ((tokens,),), why)
    _check_gate(args)
    return BlockIndices(count, indices.stride(-2), indices.stride(0) if heads else 0)


def _check_both(args: GqaArgs, indices: torch.Tensor, tokens: int, kv_heads: int) -> BlockIndices:
    """Return indices of keys and of values into the cache of one KV head."""
    names, name = args.names, args.names.block_indices
    require_dims(indices, name, (3,))
    shape = (tokens, 2, args.top_k)
    require_shape(indices, name, (shape,), "tokens, keys and values, sparse_top_k")
    require_contiguous(indices, name)
    cache = names.kv_cache if args.value_cache is None else names.key_cache
    require(kv_heads == 1, cache, "1 KV head with sparse_top_k", kv_heads)
    return BlockIndices(args.top_k, indices.stride(0))


def check_head_tables(args: GqaArgs, batch: int, kv_heads: int) -> torch.Tensor:
    """Return block tables of each KV head, which exclude what positions in the request decide."""
    names, name = args.names, args.names.block_tables
    why = "KV heads, batch, pages"
    tables = require_tensor(args.block_tables, name)
    require_dims(tables, name, (3,))
    shape = (kv_heads, batch, tables.shape[2])
    require_ints(tables, name, args.query.device, (shape,), why)
    keyword = "enable_block_sparse_attention"
    require(args.window == 0, names.window, f"no window with {keyword}", args.window)
    lengths = args.causal_seqlens_kv_global
    require(lengths is None, "causal_seqlens_kv_global", f"None with {keyword}", "a tensor")
    return tables


def _check_gate(args: GqaArgs) -> None:
    """Reject an output gate that is not like the output."""
    if args.output_gate is None:
        return
    name, query = args.names.output_gate, args.query
    gate = require_tensor(args.output_gate, name)
    require_dtype(gate, name, (query.dtype,), f"dtype of {args.names.query}")
    tokens, heads, dims = query.shape
    require_shape(gate, name, ((tokens, heads, dims), (tokens, heads * dims)), "elements of out")
    require_contiguous(gate, name)
