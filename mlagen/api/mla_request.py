"""The arguments of one MLA decode call, checked and put into one form.

Nothing here looks at the contents of a tensor, so that what holds for one call holds for every
call whose arguments have the same shapes, strides, dtypes and devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mlagen.api.arguments import (
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
from mlagen.api.mla_cache import check_cache
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_query import MOST_HEADS, QueryLayout, check_query, check_query_ends
from mlagen.api.mla_tables import check_lengths, check_tables
from mlagen.spec.mla_support import MlaVariant, require_supported

__all__ = ["LSE_FACTORS", "MOST_HEADS", "MlaRequest", "check_pointers", "check_request"]

# What an LSE in log2 units is multiplied by, to be of the base asked for.
LSE_FACTORS = {"base2": 1.0, "basee": math.log(2)}


@dataclass(frozen=True, kw_only=True)
class MlaRequest:
    """The layout of a sound call."""

    device: torch.device
    variant: MlaVariant
    out_dtype: torch.dtype
    batch: int
    q_len: int  # of every request; 0 where requests differ
    tile_q_len: int  # what a tile is chosen for: q_len, or where requests differ the usual one
    tokens: int  # query tokens of all requests
    heads: int
    num_pages: int
    max_pages: int
    top_k: int
    strides: dict[str, int]  # by parameter of the kernel
    query_rope_offset: int  # bytes from a latent part to its rope part in one tensor
    rope_cache_offset: int
    value_tables_offset: int  # bytes from a table of keys to the one of values
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]


def check_request(inputs: MlaInputs) -> MlaRequest:
    """Return the layout of ``inputs``, whose numbers are plain.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.
    UnsupportedError
        If no kernel covers dtypes, dimensions or form, on whatever device.
    """
    query = check_query(inputs)
    cache = check_cache(inputs, query.dtype)
    batch = check_lengths(inputs)
    tables = check_tables(inputs, batch, query)
    tile_q_len = check_query_ends(inputs, batch, query)
    require_workspace(inputs.workspace_buffer, inputs.names.workspace_buffer, inputs.query.device)
    require_scale(inputs.bmm1_scale, inputs.names.bmm1_scale, inputs.query.device)
    require_scale(inputs.bmm2_scale, inputs.names.bmm2_scale, inputs.query.device)
    _check_sinks(inputs, query.heads)
    bias_strides = _check_bias(inputs, query)
    out_dtype = inputs.query.dtype if query.dtype.is_16bit else torch.bfloat16
    out_shape = _check_out(inputs, out_dtype)
    lse_shape = _check_lse(inputs, query)
    check_pointers(inputs)
    variant = MlaVariant(
        query_dtype=query.dtype,
        kv_dtype=cache.dtype,
        kv_lora_rank=inputs.kv_lora_rank,
        qk_rope_head_dim=inputs.qk_rope_head_dim,
        page_size=cache.page_size,
        lookup="sparse" if inputs.top_k else "paged",
        values="shared" if inputs.value_cache is None else "separate",
        mask="causal" if inputs.bias is None else "bias",
    )
    require_supported(variant)
    return MlaRequest(
        device=inputs.query.device,
        variant=variant,
        out_dtype=out_dtype,
        batch=batch,
        q_len=query.q_len,
        tile_q_len=max(1, tile_q_len),
        tokens=query.tokens,
        heads=query.heads,
        num_pages=cache.num_pages,
        max_pages=tables.max_pages,
        top_k=inputs.top_k,
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


def check_pointers(inputs: MlaInputs) -> None:
    """Refuse tensors that do not begin at whole 16-byte addresses.

    Raises
    ------
    ArgumentError
        If there is one; the message names it.
    """
    names = ("query", "query_rope", "kv_cache", "rope_cache", "value_cache")
    for name in (*names, "workspace_buffer", "out"):
        tensor = getattr(inputs, name)
        if tensor is not None and tensor.numel():  # nothing is read of an empty part
            require_aligned_pointer(tensor, getattr(inputs.names, name))


def _check_sinks(inputs: MlaInputs, heads: int) -> None:
    if inputs.sinks is None:
        return
    require_floats(inputs.sinks, "sinks", inputs.query.device, ((heads,),), "heads of query")


def _check_bias(inputs: MlaInputs, query: QueryLayout) -> dict[str, int]:
    """Return the strides of the bias, 0 where there is none."""
    if inputs.bias is None:
        return {"bias_stride": 0, "bias_head_stride": 0}
    bias = require_tensor(inputs.bias, "bias")
    require_device(bias, "bias", inputs.query.device)
    require_dtype(bias, "bias", (torch.float32,))
    require_dims(bias, "bias", (3,))
    width = bias.shape[2]
    allowed = ((query.tokens, query.heads, width), (query.tokens, 1, width))
    require_shape(bias, "bias", allowed, "query tokens, heads or 1, positions")
    require(
        width >= inputs.max_seq_len,
        "bias.shape[2]",
        f"{inputs.max_seq_len} or more (max_seq_len)",
        width,
    )
    require_dense_last_dim(bias, "bias")
    return {
        "bias_stride": bias.stride(0),
        "bias_head_stride": 0 if bias.shape[1] == 1 else bias.stride(1),
    }


def _check_out(inputs: MlaInputs, dtype: torch.dtype) -> tuple[int, ...]:
    query, name = inputs.query, inputs.names.out
    shape = (*query.shape[:-1], inputs.kv_lora_rank)
    if inputs.out is None:
        return shape
    out = require_tensor(inputs.out, name)
    require_device(out, name, query.device)
    why = f"dtype of {inputs.names.query}" if dtype is query.dtype else f"query {query.dtype}"
    require_dtype(out, name, (dtype,), why)
    without_q_len = (shape[0], *shape[2:])
    is_single = query.dim() == 4 and query.shape[1] == 1
    require_shape(out, name, (shape, without_q_len) if is_single else (shape,))
    require_contiguous(out, name)
    return tuple(out.shape)


def _check_lse(inputs: MlaInputs, query: QueryLayout) -> tuple[int, ...]:
    flat, name = (query.tokens, query.heads), inputs.names.lse
    if inputs.lse is None or not inputs.return_lse:
        return flat
    allowed = (flat, tuple(inputs.query.shape[:-1]))
    return tuple(require_floats(inputs.lse, name, inputs.query.device, allowed).shape)
