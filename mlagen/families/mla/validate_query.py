"""Layout checks of the query of one MLA decode call, and its tokens per request."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlagen.families.common.arguments import (
    DTYPES,
    check_token_stride,
    reject,
    require,
    require_aligned,
    require_dense_last_dim,
    require_device,
    require_dims,
    require_dtype,
    require_floats,
    require_ints,
    require_shape,
    require_tensor,
    token_stride,
)
from mlagen.families.mla.args import MlaArgs
from mlagen.spec.dtype import DType
from mlagen.spec.mla.variant import MAX_HEADS

QUERY_DTYPES = {**DTYPES, torch.float8_e4m3fn: DType.E4M3}

# Torch dtypes of fp8_per_token rows; :class:`DType` describes their bytes.
FP8_PER_TOKEN_DTYPES = (torch.float8_e4m3fn, torch.uint8)
FP8_LATENT_ELEMENTS = 512  # of a row of fp8_ds_mla or fp8_per_token


class QueryLayout(NamedTuple):
    """The layout of a valid query."""

    dtype: DType
    tokens: int  # of all requests
    heads: int
    q_len: int  # of every request; 0 where requests differ
    strides: dict[str, int]  # by kernel parameter, in bytes
    rope_offset: int  # bytes from the latent to the rope part in one tensor


def check_query(args: MlaArgs) -> QueryLayout:
    """Return the layout of the query.

    Raises
    ------
    ArgumentError
        If a part of it breaks a rule.
    """
    query, names = require_tensor(args.query, args.names.query), args.names
    is_ragged = args.cum_seq_lens_q is not None
    require_dims(query, names.query, (3,) if is_ragged else (4,))
    dtype = _check_dtype(query, args)
    _check_row(query, names.query, _latent_width(args))
    heads = query.shape[-2]
    require(1 <= heads <= MAX_HEADS, f"{names.query}.shape[-2]", f"1 to {MAX_HEADS} heads", heads)
    tokens, q_len = query.shape[0], 0
    if not is_ragged:
        q_len = query.shape[1]
        require(q_len >= 1, f"{names.query}.shape[1]", "1 or more", q_len)
        tokens *= q_len
    rope = query
    if args.query_rope is not None:
        rope = require_tensor(args.query_rope, names.query_rope)
        require_device(rope, names.query_rope, query.device)
        require_dtype(rope, names.query_rope, (query.dtype,), f"dtype of {names.query}")
        expected = (*query.shape[:-1], args.qk_rope_head_dim)
        require_shape(rope, names.query_rope, (expected,))
        _check_row(rope, names.query_rope, None)
    _check_scales(args, tokens)
    size = query.element_size()
    latent_elements = FP8_LATENT_ELEMENTS if args.is_fp8_per_token else args.kv_lora_rank
    return QueryLayout(
        dtype=dtype,
        tokens=tokens,
        heads=heads,
        q_len=q_len,
        strides={
            "query_stride": _token_stride(query, names.query) * size,
            "query_head_stride": query.stride(-2) * size,
            "query_rope_stride": _token_stride(rope, names.query_rope) * size,
            "query_rope_head_stride": rope.stride(-2) * size,
        },
        rope_offset=latent_elements * size,
    )


def check_query_offsets(args: MlaArgs, batch: int, query: QueryLayout) -> int:
    """Return the query tokens of a request that the tile is chosen for.

    Raises
    ------
    ArgumentError
        If ``cum_seq_lens_q`` or ``max_q_len`` breaks a rule.
    """
    name, max_len = args.names.cum_seq_lens_q, args.max_q_len
    if args.cum_seq_lens_q is None:
        require(max_len is None, "max_q_len", f"None without {name}", max_len)
        return query.q_len
    require_ints(args.cum_seq_lens_q, name, args.query.device, ((batch + 1,),), "batch + 1")
    # With no requests, the kernel's search for a token's request would read out of bounds.
    rule = "0 (no requests)"
    require(batch > 0 or query.tokens == 0, f"{args.names.query}.shape[0]", rule, query.tokens)
    if max_len is None:
        return -(-query.tokens // max(1, batch))
    return max_len


def _token_stride(query: torch.Tensor, argument: str) -> int:
    if query.dim() == 3:
        return query.stride(0)
    check_token_stride(query, argument)
    return token_stride(query, query.shape[1])


def _check_dtype(query: torch.Tensor, args: MlaArgs) -> DType:
    if args.is_fp8_per_token:
        require_dtype(query, args.names.query, FP8_PER_TOKEN_DTYPES, "640-byte rows")
        return DType.FP8_PER_TOKEN
    require_dtype(query, args.names.query, tuple(QUERY_DTYPES))
    return QUERY_DTYPES[query.dtype]


def _latent_width(args: MlaArgs) -> tuple[int, str]:
    if args.is_fp8_per_token:
        return DType.FP8_PER_TOKEN.row_bytes(0), f"bytes of a row of {DType.FP8_PER_TOKEN}"
    if args.query_rope is not None:
        return args.kv_lora_rank, "kv_lora_rank"
    return args.kv_lora_rank + args.qk_rope_head_dim, "kv_lora_rank + qk_rope_head_dim"


def _check_row(query: torch.Tensor, argument: str, width: tuple[int, str] | None) -> None:
    if width is not None and query.shape[-1] != width[0]:
        reject(f"{argument}.shape[-1]", f"{width[0]} ({width[1]})", query.shape[-1])
    require_dense_last_dim(query, argument)
    require_aligned(query, argument)


def _check_scales(args: MlaArgs, tokens: int) -> None:
    if args.query_scales is None:
        return
    name = args.names.query_scales
    require_tensor(args.query_scales, name)
    require(args.is_fp8_per_token, name, "None without 640-byte rows", "a tensor")
    require_floats(args.query_scales, name, args.query.device, ((tokens,),), "query tokens")
