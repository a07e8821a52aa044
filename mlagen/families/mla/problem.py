"""Validation of one MLA decode call, and the problem that it describes.

No check reads the contents of a tensor, so a result holds for every call with the same shapes,
strides, dtypes and devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlagen.families.common.arguments import (
    require,
    require_aligned_pointer,
    require_contiguous,
    require_dense_last_dim,
    require_device,
    require_dims,
    require_dtype,
    require_floats,
    require_scale,
    require_shape,
    require_tensor,
    require_workspace,
)
from mlagen.families.common.problem import Problem
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.validate_kv import check_cache, check_lengths, check_tables
from mlagen.families.mla.validate_query import (
    QueryLayout,
    check_query,
    check_query_offsets,
)
from mlagen.spec.mla.variant import MlaVariant, require_supported


@dataclass(frozen=True, kw_only=True)
class MlaProblem(Problem):
    """The problem of a valid call: sizes, strides and kernel variant."""

    variant: MlaVariant
    tile_q_len: int  # that the tile is chosen for: q_len, or an estimate where requests differ
    top_k: int
    query_rope_offset: int  # bytes from the latent to the rope part in one tensor
    rope_cache_offset: int
    value_tables_offset: int  # bytes from a request's block table of keys to that of values


def check_problem(args: MlaArgs) -> MlaProblem:
    """Return the problem of ``args``, whose numbers are canonical.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.
    UnsupportedError
        If no kernel supports the dtypes, dimensions or lookup on any device.
    """
    query = check_query(args)
    cache = check_cache(args, query.dtype)
    batch = check_lengths(args)
    tables = check_tables(args, batch, query)
    tile_q_len = check_query_offsets(args, batch, query)
    require_workspace(args.workspace_buffer, args.names.workspace_buffer, args.query.device)
    require_scale(args.bmm1_scale, args.names.bmm1_scale, args.query.device)
    require_scale(args.bmm2_scale, args.names.bmm2_scale, args.query.device)
    _check_sinks(args, query.heads)
    bias_strides = _check_bias(args, query)
    out_dtype = args.query.dtype if query.dtype.is_16bit else torch.bfloat16
    out_shape = _check_out(args, out_dtype)
    lse_shape = _check_lse(args, query)
    check_pointers(args)
    variant = MlaVariant(
        query_dtype=query.dtype,
        kv_dtype=cache.dtype,
        kv_lora_rank=args.kv_lora_rank,
        qk_rope_head_dim=args.qk_rope_head_dim,
        page_size=cache.page_size,
        lookup="sparse" if args.top_k else "paged",
        values="shared" if args.value_cache is None else "separate",
        mask=_mask_of(args),
    )
    require_supported(variant)
    return MlaProblem(
        device=args.query.device,
        variant=variant,
        out_dtype=out_dtype,
        batch=batch,
        q_len=query.q_len,
        tile_q_len=max(1, tile_q_len),
        tokens=query.tokens,
        heads=query.heads,
        num_pages=cache.num_pages,
        max_pages=tables.max_pages,
        top_k=args.top_k,
        strides={
            **query.strides,
            **cache.strides,
            **bias_strides,
            "block_tables_stride": tables.stride,
        },
        query_rope_offset=query.rope_offset,
        rope_cache_offset=cache.rope_offset,
        value_tables_offset=tables.values_offset,
        out_shape=out_shape,
        lse_shape=lse_shape,
    )


def check_pointers(args: MlaArgs) -> None:
    """Reject tensors whose base address is not 16-byte aligned.

    Raises
    ------
    ArgumentError
        If there is one; the message names it.
    """
    names = ("query", "query_rope", "kv_cache", "rope_cache", "value_cache")
    for name in (*names, "workspace_buffer", "out"):
        tensor = getattr(args, name)
        if tensor is not None and tensor.numel():  # the kernels do not read an empty part
            require_aligned_pointer(tensor, getattr(args.names, name))


def _mask_of(args: MlaArgs) -> str:
    if args.causal_seqlens_kv_global is not None:
        return "dcp"
    return "causal" if args.bias is None else "bias"


def _check_sinks(args: MlaArgs, heads: int) -> None:
    if args.sinks is None:
        return
    require_floats(args.sinks, "sinks", args.query.device, ((heads,),), "heads of query")


def _check_bias(args: MlaArgs, query: QueryLayout) -> dict[str, int]:
    """Return the strides of the bias, 0 where there is none."""
    if args.bias is None:
        return {"bias_stride": 0, "bias_head_stride": 0}
    bias = require_tensor(args.bias, "bias")
    require_device(bias, "bias", args.query.device)
    require_dtype(bias, "bias", (torch.float32,))
    require_dims(bias, "bias", (3,))
    width = bias.shape[2]
    allowed = ((query.tokens, query.heads, width), (query.tokens, 1, width))
    require_shape(bias, "bias", allowed, "query tokens, heads or 1, positions")
    require(
        width >= args.max_seq_len,
        "bias.shape[2]",
        f"{args.max_seq_len} or more (max_seq_len)",
        width,
    )
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


def _check_lse(args: MlaArgs, query: QueryLayout) -> tuple[int, ...]:
    flat, name = (query.tokens, query.heads), args.names.lse
    if args.lse is None:
        return flat
    allowed = (flat, tuple(args.query.shape[:-1]))
    return tuple(require_floats(args.lse, name, args.query.device, allowed).shape)
