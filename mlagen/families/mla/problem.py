"""Validation of one MLA decode call, and the problem that it describes.

No check reads the contents of a tensor, so a result holds for every call with the same shapes,
strides, dtypes and devices. Every check raises :class:`ArgumentError`, whose message has the
caller's name of the argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mlagen.families.common.arguments import (
    FLOAT_DTYPES,
    check_token_stride,
    reject,
    require,
    require_aligned,
    require_aligned_pointer,
    require_contiguous,
    require_dense_last_dim,
    require_device,
    require_dims,
    require_dtype,
    require_float32,
    require_floats,
    require_index,
    require_ints,
    require_shape,
    require_strides,
    require_tensor,
    token_stride,
)
from mlagen.families.common.problem import Problem, checked_tables, require_scratch_and_scales
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.two_pools import (
    TopkList,
    check_lists,
    pool_parameters_of,
    strides_of,
)
from mlagen.spec.dtype import DType, row_dtype_of
from mlagen.spec.mla.variant import E4M3_SCALES, MAX_HEADS, MlaVariant, require_supported

# Of rows with the width of DeepSeek-V3.2's; :func:`row_dtype_of` knows the others.
KV_DTYPES = {**FLOAT_DTYPES, torch.uint8: DType.FP8_DS_MLA}
# Torch dtypes of rows whose format the call names.
PACKED_DTYPES = (torch.float8_e4m3fn, torch.uint8)


@dataclass(frozen=True, kw_only=True)
class MlaProblem(Problem):
    """The problem of a valid call: sizes, strides and kernel variant."""

    variant: MlaVariant
    tile_q_len: int  # that the tile is chosen for: q_len, or an estimate where requests differ
    top_k: int
    query_rope_offset: int  # bytes from the latent to the rope part in one tensor
    rope_cache_offset: int
    value_tables_offset: int  # bytes from a request's block table of keys to that of values
    extra_top_k: int = 0  # of the second pool
    pool_parameters: dict[str, int] = field(
        default_factory=dict
    )  # of two pools, by kernel parameter


def check_problem(args: MlaArgs) -> MlaProblem:
    """Return the problem of ``args``, whose numbers are canonical.

    Raises UnsupportedError if no kernel supports the dtypes, dimensions or lookup on any device.
    """
    query_dtype, query_strides = _check_query(args)
    query, heads = args.query, args.query.shape[-2]
    q_len = query.shape[1] if args.cum_seq_lens_q is None else 0
    tokens = query.shape[0] * max(1, q_len)
    if args.query_scales is not None:
        name = args.names.query_scales
        require_tensor(args.query_scales, name)
        require(args.is_fp8_per_token, name, "None without 640-byte rows", "a tensor")
        require_floats(args.query_scales, name, query.device, ((tokens,),), "query tokens")
    lists: list[TopkList] = []
    if args.kv_cache_format is not None:
        kv_dtype = DType(args.kv_cache_format)
        lists = check_lists(args, tokens)
        cache, batch = args.kv_cache, query.shape[0]
        page_size, cache_strides = 0, {**strides_of(lists), **_strides_of_scales(None)}
        max_pages, tables_stride, values_offset = 0, lists[0].indices_stride, 0
    else:
        cache, kv_dtype, cache_strides = _check_cache(args, query_dtype)
        page_size = cache.shape[1]
        batch = _check_lengths(args)
        max_pages, tables_stride, values_offset = _check_tables(args, batch, q_len, tokens)
    tile_q_len = _check_offsets(args, batch, q_len, tokens)
    require_scratch_and_scales(args)
    if args.sinks is not None:
        require_floats(args.sinks, "sinks", query.device, ((heads,),), "heads of query")
    bias_strides = _check_bias(args, tokens)
    out_dtype = query.dtype if query_dtype.is_16bit else torch.bfloat16
    out_shape = _check_out(args, out_dtype)
    lse_shape: tuple[int, ...] = out_shape[:-1] if lists else (tokens, heads)
    if args.lse is not None:
        allowed = ((tokens, heads), tuple(query.shape[:-1]))
        lse_shape = tuple(require_floats(args.lse, args.names.lse, query.device, allowed).shape)
    check_pointers(args)
    mask = "causal" if args.bias is None else "bias"
    variant = MlaVariant(
        query_dtype=query_dtype,
        kv_dtype=kv_dtype,
        kv_lora_rank=args.kv_lora_rank,
        qk_rope_head_dim=args.qk_rope_head_dim,
        page_size=page_size,
        lookup="two_pools" if lists else "sparse" if args.top_k else "paged",
        values="shared" if args.value_cache is None else "separate",
        mask=mask if args.causal_seqlens_kv_global is None else "dcp",
        batch_invariant=args.batch_invariant,
    )
    require_supported(variant)
    rank, packed_query = args.kv_lora_rank, query_dtype.row
    query_latent = rank if packed_query is None else packed_query.bf16_offset
    return MlaProblem(
        device=query.device,
        variant=variant,
        out_dtype=out_dtype,
        batch=batch,
        q_len=q_len,
        tile_q_len=max(1, tile_q_len),
        tokens=tokens,
        heads=heads,
        num_pages=cache.shape[0],
        max_pages=max_pages,
        top_k=args.top_k,
        strides={
            **query_strides,
            **cache_strides,
            **bias_strides,
            "block_tables_stride": tables_stride,
        },
        query_rope_offset=query_latent * query.element_size(),
        rope_cache_offset=rank * cache.element_size() if kv_dtype.row is None else 0,
        value_tables_offset=values_offset,
        out_shape=out_shape,
        lse_shape=lse_shape,
        extra_top_k=sum(each.top_k for each in lists[1:]),
        pool_parameters=pool_parameters_of(lists) if lists else {},
    )


def check_pointers(args: MlaArgs) -> None:
    """Reject tensors whose base address is not 16-byte aligned."""
    names = ("query", "query_rope", "kv_cache", "rope_cache", "value_cache", "extra_cache")
    for name in (*names, "workspace_buffer", "out"):
        tensor = getattr(args, name)
        if tensor is not None and tensor.numel():  # the kernels do not read an empty part
            require_aligned_pointer(tensor, getattr(args.names, name))


def pages_of(cache: torch.Tensor) -> torch.Tensor:
    """Return a view of a valid cache as ``[pages, page_size, width]``."""
    if cache.dim() == 3:
        return cache
    return cache.squeeze(1 if cache.shape[1] == 1 else 2)


def _check_query(args: MlaArgs) -> tuple[DType, dict[str, int]]:
    """Return the dtype of the query, and its strides in bytes by kernel parameter."""
    query, names = require_tensor(args.query, args.names.query), args.names
    is_ragged = args.cum_seq_lens_q is not None
    require_dims(query, names.query, (3,) if is_ragged else (4,))
    if args.is_fp8_per_token:
        dtype = DType.FP8_PER_TOKEN
        require_dtype(query, names.query, PACKED_DTYPES, "640-byte rows")
        width, why = dtype.row_bytes(_width_of(args)), f"bytes of a row of {dtype}"
    else:
        require_dtype(query, names.query, tuple(FLOAT_DTYPES))
        dtype = FLOAT_DTYPES[query.dtype]
        width, why = args.kv_lora_rank + args.qk_rope_head_dim, "kv_lora_rank + qk_rope_head_dim"
        if args.query_rope is not None:
            width, why = args.kv_lora_rank, "kv_lora_rank"
    require(
        query.shape[-1] == width, f"{names.query}.shape[-1]", f"{width} ({why})", query.shape[-1]
    )
    _check_rows(query, names.query)
    heads = query.shape[-2]
    require(1 <= heads <= MAX_HEADS, f"{names.query}.shape[-2]", f"1 to {MAX_HEADS} heads", heads)
    if not is_ragged:
        require(query.shape[1] >= 1, f"{names.query}.shape[1]", "1 or more", query.shape[1])
    rope = query
    if args.query_rope is not None:
        rope = require_tensor(args.query_rope, names.query_rope)
        require_device(rope, names.query_rope, query.device)
        require_dtype(rope, names.query_rope, (query.dtype,), f"dtype of {names.query}")
        expected = (*query.shape[:-1], args.qk_rope_head_dim)
        require_shape(rope, names.query_rope, (expected,))
        _check_rows(rope, names.query_rope)
    size = query.element_size()
    return dtype, {
        "query_stride": _token_stride(query, names.query) * size,
        "query_head_stride": query.stride(-2) * size,
        "query_rope_stride": _token_stride(rope, names.query_rope) * size,
        "query_rope_head_stride": rope.stride(-2) * size,
    }


def _width_of(args: MlaArgs) -> int:
    return args.kv_lora_rank + args.qk_rope_head_dim


def _token_stride(query: torch.Tensor, argument: str) -> int:
    if query.dim() == 3:
        return query.stride(0)
    check_token_stride(query, argument)
    return token_stride(query, query.shape[1])


def _check_rows(tensor: torch.Tensor, argument: str) -> None:
    require_dense_last_dim(tensor, argument)
    require_aligned(tensor, argument)


def _check_offsets(args: MlaArgs, batch: int, q_len: int, tokens: int) -> int:
    """Return the query tokens of a request that the tile is chosen for."""
    name, max_len = args.names.cum_seq_lens_q, args.max_q_len
    if args.cum_seq_lens_q is None:
        require(max_len is None, "max_q_len", f"None without {name}", max_len)
        return q_len
    require_ints(args.cum_seq_lens_q, name, args.query.device, ((batch + 1,),), "batch + 1")
    # With no requests, the kernel's search for a token's request would read out of bounds.
    is_valid = batch > 0 or tokens == 0
    require(is_valid, f"{args.names.query}.shape[0]", "0 (no requests)", tokens)
    return -(-tokens // max(1, batch)) if max_len is None else max_len


def _check_cache(args: MlaArgs, query_dtype: DType) -> tuple[torch.Tensor, DType, dict[str, int]]:
    """Return the cache as pages, its dtype, and strides by kernel parameter.

    They are those of its rope part and of its scales, too: bytes, for scales elements.
    """
    names, device = args.names, args.query.device
    cache = _checked_pages(args.kv_cache, names.kv_cache, device)
    dtype = _cache_dtype(cache, args)
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
    if args.value_cache is not None:  # the kernel has one set of strides
        name = names.value_cache
        values = _checked_pages(args.value_cache, name, device)
        require_dtype(values, name, (cache.dtype,), f"dtype of {names.kv_cache}")
        require_shape(values, name, (tuple(cache.shape),), f"shape of {names.kv_cache}")
        require_strides(values, name, cache, names.kv_cache)
    size = cache.element_size()
    return (
        cache,
        dtype,
        {
            "page_stride": cache.stride(0) * size,
            "token_stride": cache.stride(1) * size,
            "rope_page_stride": rope.stride(0) * size,
            "rope_token_stride": rope.stride(1) * size,
            **_check_scales(args, cache, query_dtype, dtype),
        },
    )


def _checked_pages(value: object, argument: str, device: torch.device) -> torch.Tensor:
    cache = require_tensor(value, argument)
    require_device(cache, argument, device)
    require_dims(cache, argument, (3, 4))
    if cache.dim() == 4 and 1 not in cache.shape[1:3]:
        rule = "[pages, 1, page_size, head_dim] or [pages, page_size, 1, head_dim]"
        reject(f"{argument}.shape", rule, list(cache.shape))
    return pages_of(cache)


def _cache_dtype(cache: torch.Tensor, args: MlaArgs) -> DType:
    name, query = args.names.kv_cache, args.query
    if args.is_fp8_per_token:
        require_dtype(cache, name, PACKED_DTYPES, "640-byte rows")
        return DType.FP8_PER_TOKEN
    allowed = tuple(dict.fromkeys((query.dtype, torch.float8_e4m3fn, torch.uint8)))
    require_dtype(cache, name, allowed, f"query {query.dtype}; uint8 for fp8_ds_mla")
    if cache.dtype is torch.uint8:
        return row_dtype_of(cache.shape[-1], _width_of(args))
    return FLOAT_DTYPES[cache.dtype]


def _check_width(cache: torch.Tensor, args: MlaArgs, dtype: DType) -> None:
    rank, rope = args.kv_lora_rank, args.qk_rope_head_dim
    argument, width = f"{args.names.kv_cache}.shape[-1]", cache.shape[-1]
    if dtype.row is not None:
        expected = dtype.row.row_bytes(rank + rope)
        why = f"bytes of a row of {dtype}"
        require(args.rope_cache is None, args.names.rope_cache, f"None for {dtype}", "a tensor")
        if rope == 0 and dtype.row.has(rank):
            require(width >= expected, argument, f"{expected} or more ({why} without rope)", width)
            return
    elif args.rope_cache is not None:
        expected, why = rank, "kv_lora_rank"
    else:
        expected, why = rank + rope, "kv_lora_rank + qk_rope_head_dim"
    require(width == expected, argument, f"{expected} ({why})", width)


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
        return _strides_of_scales(None)
    scales = require_tensor(args.kv_scales, name)
    has_outer_scales = dtype.row is not None and dtype.row.scale_place == "tensor"
    is_valid = has_outer_scales or (is_dequantized and args.value_cache is None)
    require(is_valid, name, f"None for query {query_dtype}, cache {dtype}", "a tensor")
    require_device(scales, name, args.query.device)
    require_dtype(scales, name, (torch.float32,))
    pages, page_size = cache.shape[:2]
    count = E4M3_SCALES if dtype.row is None else dtype.row.scales
    if count > 1:
        expected = (pages, page_size, count)
        require_shape(scales, name, (expected,), "pages, page_size, scales of a token")
        require_dense_last_dim(scales, name)
    else:
        require_shape(scales, name, ((pages, page_size),), "pages, page_size")
    return _strides_of_scales(scales)


def _strides_of_scales(scales: torch.Tensor | None) -> dict[str, int]:
    page, token = (0, 0) if scales is None else (scales.stride(0), scales.stride(1))
    return {"scale_page_stride": page, "scale_token_stride": token}


def _check_lengths(args: MlaArgs) -> int:
    """Return the number of requests."""
    name = args.names.seq_lens
    seq_lens = require_tensor(args.seq_lens, name)
    require_index(seq_lens, name, args.query.device)
    require_dims(seq_lens, name, (1,))
    require_contiguous(seq_lens, name)
    if args.cum_seq_lens_q is None:
        require_shape(seq_lens, name, ((args.query.shape[0],),), "batch of query")
    return seq_lens.shape[0]


def _check_tables(args: MlaArgs, batch: int, q_len: int, tokens: int) -> tuple[int, int, int]:
    """Return the pages of a request, the elements between tables, and the bytes to values.

    With flat page ids the pages are those of all requests, with top-k indices there are none.
    """
    name = args.names.block_tables
    if args.top_k_lens is not None:
        top_k_name = args.names.top_k_lens
        require(args.top_k > 0, top_k_name, "None without sparse_mla_top_k", "a tensor")
        require_ints(args.top_k_lens, top_k_name, args.query.device, ((tokens,),), "query tokens")
    if args.top_k:
        tables = require_tensor(args.block_tables, name)
        require_index(tables, name, args.query.device)
        rule = "None with sparse_mla_top_k"
        require(args.kv_indptr is None, args.names.kv_indptr, rule, "a tensor")
        if q_len == 0:
            why = "query tokens, sparse_mla_top_k"
            require_shape(tables, name, ((tokens, args.top_k),), why)
            stride = tables.stride(0)
        else:
            expected = (batch, q_len, args.top_k)
            require_shape(tables, name, (expected,), "batch, q_len, sparse_mla_top_k")
            check_token_stride(tables, name)
            stride = token_stride(tables, q_len)
        require_dense_last_dim(tables, name)
        return 0, stride, 0
    # Separate tables of keys and values need separate value storage.
    tables = checked_tables(args, batch, (2,) if args.value_cache is None else (2, 3))
    if args.kv_indptr is not None:
        return tables.shape[0], 0, 0
    values_offset = 0
    if tables.dim() == 3:
        require(tables.shape[1] == 2, f"{name}.shape[1]", "2 (keys, values)", tables.shape[1])
        values_offset = tables.stride(1) * tables.element_size()
    return tables.shape[-1], tables.stride(0), values_offset


def _check_bias(args: MlaArgs, tokens: int) -> dict[str, int]:
    """Return the strides of the bias, 0 where there is none."""
    if args.bias is None:
        return {"bias_stride": 0, "bias_head_stride": 0}
    bias = require_tensor(args.bias, "bias")
    require_device(bias, "bias", args.query.device)
    require_dtype(bias, "bias", (torch.float32,))
    require_dims(bias, "bias", (3,))
    width, heads = bias.shape[2], args.query.shape[-2]
    allowed = ((tokens, heads, width), (tokens, 1, width))
    require_shape(bias, "bias", allowed, "query tokens, heads or 1, positions")
    rule = f"{args.max_seq_len} or more (max_seq_len)"
    require(width >= args.max_seq_len, "bias.shape[2]", rule, width)
    require_dense_last_dim(bias, "bias")
    return {
        "bias_stride": bias.stride(0),
        "bias_head_stride": 0 if bias.shape[1] == 1 else bias.stride(1),
    }


def _check_out(args: MlaArgs, dtype: torch.dtype) -> tuple[int, ...]:
    query, name = args.query, args.names.out
    shape = (*query.shape[:-1], args.kv_lora_rank)
    if args.out is None:
        return shape if args.out_shape is None else tuple(args.out_shape)
    out = require_tensor(args.out, name)
    require_device(out, name, query.device)
    why = f"dtype of {args.names.query}" if dtype is query.dtype else f"query {query.dtype}"
    require_dtype(out, name, (dtype,), why)
    without_q_len = (shape[0], *shape[2:])
    is_single = query.dim() == 4 and query.shape[1] == 1
    require_shape(out, name, (shape, without_q_len) if is_single else (shape,))
    require_contiguous(out, name)
    return tuple(out.shape)
