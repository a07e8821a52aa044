"""Layout checks of the paged KV cache of one MLA decode call, its lengths and block tables."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlagen.families.common.arguments import (
    DTYPES,
    check_token_stride,
    reject,
    require,
    require_aligned,
    require_contiguous,
    require_dense_last_dim,
    require_device,
    require_dims,
    require_dtype,
    require_float32,
    require_index,
    require_ints,
    require_shape,
    require_strides,
    require_tensor,
    token_stride,
)
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.validate_query import (
    FP8_LATENT_ELEMENTS,
    FP8_PER_TOKEN_DTYPES,
    QueryLayout,
)
from mlagen.spec.dtype import DType

# Scales of a token in a cache with one scale per 128 latent elements; a shorter latent part does
# not use the last ones.
SCALES_PER_TOKEN = 4


class CacheLayout(NamedTuple):
    """The layout of a valid cache."""

    dtype: DType
    num_pages: int
    page_size: int
    strides: dict[str, int]  # by kernel parameter: bytes, for scales elements
    rope_offset: int  # bytes from the latent to the rope part in one tensor


def check_cache(args: MlaArgs, query_dtype: DType) -> CacheLayout:
    """Return the layout of the cache, its rope part, values and scales.

    Raises
    ------
    ArgumentError
        If one of them breaks a rule.
    """
    names, device = args.names, args.query.device
    cache = _checked_pages(args.kv_cache, names.kv_cache, device)
    dtype = _check_dtype(cache, args)
    _check_width(cache, args, dtype)
    _check_rows(cache, names.kv_cache)
    require(cache.shape[1] >= 1, f"{names.kv_cache}.shape", "pages of 1 token or more", 0)
    rope = cache
    if args.rope_cache is not None:
        rope = _checked_pages(args.rope_cache, names.rope_cache, device)
        require_dtype(rope, names.rope_cache, (cache.dtype,), f"dtype of {names.kv_cache}")
        expected = (*cache.shape[:2], args.qk_rope_head_dim)
        require_shape(rope, names.rope_cache, (expected,), "pages, page_size, qk_rope_head_dim")
        _check_rows(rope, names.rope_cache)
    if args.value_cache is not None:
        _check_values(args, cache)
    size = cache.element_size()
    has_packed_rope = dtype in (DType.FP8_PER_TOKEN, DType.FP8_DS_MLA)
    return CacheLayout(
        dtype=dtype,
        num_pages=cache.shape[0],
        page_size=cache.shape[1],
        strides={
            "page_stride": cache.stride(0) * size,
            "token_stride": cache.stride(1) * size,
            "rope_page_stride": rope.stride(0) * size,
            "rope_token_stride": rope.stride(1) * size,
            **_check_scales(args, cache, query_dtype, dtype),
        },
        rope_offset=0 if has_packed_rope else args.kv_lora_rank * size,
    )


def pages_of(cache: torch.Tensor) -> torch.Tensor:
    """Return a view of a valid cache as ``[pages, page_size, width]``."""
    if cache.dim() == 3:
        return cache
    return cache.squeeze(1 if cache.shape[1] == 1 else 2)


def _checked_pages(value: object, argument: str, device: torch.device) -> torch.Tensor:
    cache = require_tensor(value, argument)
    require_device(cache, argument, device)
    require_dims(cache, argument, (3, 4))
    if cache.dim() == 4 and 1 not in cache.shape[1:3]:
        rule = "[pages, 1, page_size, head_dim] or [pages, page_size, 1, head_dim]"
        reject(f"{argument}.shape", rule, list(cache.shape))
    return pages_of(cache)


def _check_dtype(cache: torch.Tensor, args: MlaArgs) -> DType:
    name, query = args.names.kv_cache, args.query
    if args.is_fp8_per_token:
        require_dtype(cache, name, FP8_PER_TOKEN_DTYPES, "640-byte rows")
        return DType.FP8_PER_TOKEN
    allowed = tuple(dict.fromkeys((query.dtype, torch.float8_e4m3fn, torch.uint8)))
    require_dtype(cache, name, allowed, f"query {query.dtype}; uint8 for fp8_ds_mla")
    if cache.dtype is torch.uint8:
        return DType.FP8_DS_MLA
    return DTYPES.get(cache.dtype, DType.E4M3)


def _check_width(cache: torch.Tensor, args: MlaArgs, dtype: DType) -> None:
    rank, rope = args.kv_lora_rank, args.qk_rope_head_dim
    argument, width = f"{args.names.kv_cache}.shape[-1]", cache.shape[-1]
    if dtype in (DType.FP8_PER_TOKEN, DType.FP8_DS_MLA):
        expected = dtype.row_bytes(FP8_LATENT_ELEMENTS + rope)
        why = f"bytes of a row of {dtype}"
        require(args.rope_cache is None, args.names.rope_cache, f"None for {dtype}", "a tensor")
        if dtype is DType.FP8_DS_MLA and rope == 0:
            require(width >= expected, argument, f"{expected} or more ({why} without rope)", width)
            return
    elif args.rope_cache is not None:
        expected, why = rank, "kv_lora_rank"
    else:
        expected, why = rank + rope, "kv_lora_rank + qk_rope_head_dim"
    require(width == expected, argument, f"{expected} ({why})", width)


def _check_rows(cache: torch.Tensor, argument: str) -> None:
    require_dense_last_dim(cache, argument)
    require_aligned(cache, argument)


def _check_values(args: MlaArgs, cache: torch.Tensor) -> None:
    """Reject values with other strides than the keys: the kernel has one set of strides."""
    name, keys = args.names.value_cache, args.names.kv_cache
    values = _checked_pages(args.value_cache, name, args.query.device)
    require_dtype(values, name, (cache.dtype,), f"dtype of {keys}")
    require_shape(values, name, (tuple(cache.shape),), f"shape of {keys}")
    require_strides(values, name, cache, keys)


def _check_scales(
    args: MlaArgs, cache: torch.Tensor, query_dtype: DType, dtype: DType
) -> dict[str, int]:
    """Return the strides of the scales, 0 where there are none."""
    is_dequantized = dtype is DType.E4M3 and query_dtype.is_16bit
    for name in ("latent_scale", "rope_scale"):
        scale = getattr(args, name)
        require_float32(scale, name)
        if not is_dequantized and scale != 1.0:
            reject(name, "1.0 unless the cache is e4m3 and the query is not", scale)
    name = args.names.kv_scales
    if args.kv_scales is None:
        return {"scale_page_stride": 0, "scale_token_stride": 0}
    scales = require_tensor(args.kv_scales, name)
    is_valid = dtype is DType.FP8_PER_TOKEN or (is_dequantized and args.value_cache is None)
    require(is_valid, name, f"None for query {query_dtype}, cache {dtype}", "a tensor")
    require_device(scales, name, args.query.device)
    require_dtype(scales, name, (torch.float32,))
    pages, page_size = cache.shape[:2]
    if is_dequantized:
        expected = (pages, page_size, SCALES_PER_TOKEN)
        require_shape(scales, name, (expected,), "pages, page_size, scales of a token")
        require_dense_last_dim(scales, name)
    else:
        require_shape(scales, name, ((pages, page_size),), "pages, page_size")
    return {"scale_page_stride": scales.stride(0), "scale_token_stride": scales.stride(1)}


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
