"""Validation of one grouped-query decode call, and the problem that it describes.

No check reads the contents of a tensor, so a result holds for every call with the same shapes,
strides, dtypes and devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlagen.families.common.arguments import (
    DTYPES,
    reject_dtype,
    require,
    require_aligned,
    require_contiguous,
    require_dense_last_dim,
    require_device,
    require_dims,
    require_dtype,
    require_floats,
    require_index,
    require_ints,
    require_scale,
    require_shape,
    require_tensor,
    require_workspace,
)
from mlagen.families.common.outputs import LSE_FACTORS
from mlagen.families.common.problem import Problem
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.validate_kv import (
    QUANTIZED,
    Pair,
    alignment_of,
    cache_names,
    check_pointers,
    paged_caches,
    paged_scales,
)
from mlagen.families.gqa.validate_query import check_query, check_query_tokens
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.variant import GqaVariant, require_supported

MASK_DTYPES = (torch.uint16, torch.uint32, torch.int32)

_OUT_E4M3 = torch.float8_e4m3fn
MAX_TOKENS = 0x7FFF0000  # of a request, as in templates/common/paged_kv.cuh


@dataclass(frozen=True, kw_only=True)
class GqaProblem(Problem):
    """The problem of a valid call: sizes, strides and kernel variant."""

    variant: GqaVariant
    max_q_len: int
    kv_heads: int
    window: int  # MAX_TOKENS: no limit
    mask_words: int  # 32-bit words per row of the mask; 0: no mask
    is_causal: bool
    value_offset: int  # bytes from the first key to the first value in one tensor
    value_scale_offset: int
    score_factor: float
    lse_factor: float  # from base 2 to the base of the LSE
    bmm2_scales_scores: bool
    takes_bmm2: bool

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


def check_problem(args: GqaArgs) -> GqaProblem:
    """Return the problem of ``args``, whose numbers are canonical.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.
    UnsupportedError
        If no kernel supports the dtypes or head dimension on any device.
    """
    names = args.names
    query = check_query(args)
    heads, head_dim = query.shape[-2:]
    caches = paged_caches(args)
    kv_heads = _check_caches(args, caches)
    scales = paged_scales(args, caches)
    batch, tokens, query_stride = check_query_tokens(args)
    tables = _check_tables(args, batch)
    require_workspace(args.workspace_buffer, names.workspace_buffer, query.device)
    require_scale(args.bmm1_scale, names.bmm1_scale, query.device)
    require_scale(args.bmm2_scale, names.bmm2_scale, query.device)
    _check_sinks(args, kv_heads)
    mask_words = _check_mask(args, batch, tokens)
    kv_dtype = QUANTIZED.get(caches.key.dtype, DTYPES[query.dtype])
    out_dtype, out_shape = _check_out(args, kv_dtype, batch)
    lse_shape = _check_lse(args, out_shape, batch, tokens)
    check_pointers(args)
    variant = GqaVariant(
        query_dtype=DTYPES[query.dtype],
        kv_dtype=kv_dtype,
        out_dtype=DType.E4M3 if out_dtype is _OUT_E4M3 else DTYPES[query.dtype],
        head_dim=head_dim,
        page_size=caches.key.shape[1],
    )
    require_supported(variant)
    # A window of the whole table masks nothing.
    covered = min(tables.shape[-1] * variant.page_size, MAX_TOKENS)
    is_quantized = not kv_dtype.is_16bit
    return GqaProblem(
        device=query.device,
        variant=variant,
        out_dtype=out_dtype,
        out_shape=out_shape,
        lse_shape=lse_shape,
        batch=batch,
        q_len=args.q_len if args.cum_seq_lens_q is None else 0,
        max_q_len=args.q_len,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        num_pages=caches.key.shape[0],
        max_pages=tables.shape[-1],
        window=args.window if 0 < args.window < covered else MAX_TOKENS,
        mask_words=mask_words,
        is_causal=args.is_causal,
        strides={
            "query_stride": query_stride,
            "query_head_stride": query.stride(-2),
            "block_tables_stride": tables.stride(0) if args.kv_indptr is None else 0,
            **_byte_strides("key", caches.key),
            **_byte_strides("value", caches.value),
            **_byte_strides("key_scale", scales and scales.key),
            **_byte_strides("value_scale", scales and scales.value),
        },
        value_offset=_offset(args.key_cache) if args.value_cache is None else 0,
        value_scale_offset=_offset(args.key_scales) if args.value_scales is None else 0,
        score_factor=head_dim**-0.5 if args.scales_like_xqa else 1.0,
        lse_factor=LSE_FACTORS[args.return_lse_base],
        bmm2_scales_scores=args.scales_like_xqa and is_quantized,
        takes_bmm2=is_quantized or not args.scales_like_xqa,
    )


def _check_caches(args: GqaArgs, caches: Pair) -> int:
    """Check sizes and strides of the caches, and return the number of KV heads."""
    heads, head_dim = args.query.shape[-2:]
    is_nvfp4 = caches.key.dtype is torch.uint8
    name = cache_names(args)[0]
    _, page_size, kv_heads, width = caches.key.shape
    expected = head_dim // 2 if is_nvfp4 else head_dim
    why = f"head_dim of {args.names.query}"
    why += " / 2" if is_nvfp4 else ""
    require(width == expected, f"{name}.shape[-1]", f"{expected} ({why})", width)
    require(page_size >= 1, name, "1 token or more in a page", page_size)
    require(kv_heads >= 1, name, "1 head or more", kv_heads)
    multiple = f"a multiple of {kv_heads} (heads of {name})"
    require(heads % kv_heads == 0, f"{args.names.query}.shape[-2]", multiple, heads)
    for cache, argument in zip(caches, cache_names(args), strict=True):
        require_dense_last_dim(cache, argument)
        require_aligned(cache, argument, alignment_of(cache))
    return kv_heads


def _check_tables(args: GqaArgs, batch: int) -> torch.Tensor:
    name = args.names.block_tables
    tables = require_tensor(args.block_tables, name)
    require_index(tables, name, args.query.device)
    if args.kv_indptr is not None:
        require_dims(tables, name, (1,))
        require_dense_last_dim(tables, name)
        shape = (batch + 1,)
        require_ints(args.kv_indptr, args.names.kv_indptr, args.query.device, (shape,), "batch + 1")
        return tables
    require_dims(tables, name, (2,))
    require_dense_last_dim(tables, name)
    require(tables.shape[0] == batch, f"{name}.shape[0]", f"{batch} (batch)", tables.shape[0])
    return tables


def _check_sinks(args: GqaArgs, kv_heads: int) -> None:
    if args.sinks is None:
        return
    name, heads = args.names.sinks, args.query.shape[-2]
    allowed = ((heads,), (kv_heads, heads // kv_heads))
    why = f"heads of {args.names.query}"
    require_floats(args.sinks, name, args.query.device, allowed, why)


def _check_mask(args: GqaArgs, batch: int, tokens: int) -> int:
    """Return the 32-bit words per row of the mask; 0 where there is none."""
    if not args.is_causal:
        require(args.mask is None, args.names.mask, "None with causal=False", "a mask")
        require(args.window == 0, args.names.window, "no window with causal=False", args.window)
    # A single query token has no drafts; FlashInfer ignores the mask then.
    if args.mask is None or args.q_len == 1:
        return 0
    name = args.names.mask
    mask = require_tensor(args.mask, name)
    require_device(mask, name, args.query.device)
    require_dtype(mask, name, MASK_DTYPES)
    words = -(-args.q_len // 32)
    elements = words * 4 // mask.element_size()
    shapes: tuple[tuple[int, ...], ...] = ((tokens, elements),)
    if args.cum_seq_lens_q is None:
        shapes = ((batch, args.q_len, elements), *shapes)
    require_shape(mask, name, shapes, f"a bit for each of {args.q_len} drafts, in 32-bit words")
    require_contiguous(mask, name)
    return words


def _check_out(args: GqaArgs, kv_dtype: DType, batch: int) -> tuple[torch.dtype, tuple[int, ...]]:
    query, name = args.query, args.names.out
    split = (batch, args.q_len, *query.shape[-2:])
    is_uniform = args.cum_seq_lens_q is None and not args.with_beam_axis
    allowed: tuple[torch.dtype, ...] = (query.dtype,)
    why = f"dtype of {args.names.query}; e4m3 only from a cache of e4m3"
    if kv_dtype is DType.E4M3:
        allowed, why = (query.dtype, _OUT_E4M3), f"the first is that of {args.names.query}"
    if args.out is None:
        dtype = args.out_dtype or query.dtype
        if dtype not in allowed:
            reject_dtype("out_dtype", f"{' or '.join(map(str, allowed))} ({why})", dtype)
        has_split = is_uniform and args.q_len > 1 and not args.is_out_like_query
        return dtype, split if has_split else tuple(query.shape)
    out = require_tensor(args.out, name)
    require_device(out, name, query.device)
    require_dtype(out, name, allowed, why)
    shapes = (tuple(query.shape), split) if is_uniform else (tuple(query.shape),)
    require_shape(out, name, shapes)
    require_contiguous(out, name)
    return out.dtype, tuple(out.shape)


def _check_lse(
    args: GqaArgs, out_shape: tuple[int, ...], batch: int, tokens: int
) -> tuple[int, ...]:
    """Return the shape of the LSE: that of the output without its last dimension."""
    if args.lse is None:
        return out_shape[:-1]
    heads = args.query.shape[-2]
    allowed: tuple[tuple[int, ...], ...] = ((tokens, heads), tuple(args.query.shape[:-1]))
    if args.cum_seq_lens_q is None:
        allowed = (*allowed, (batch, args.q_len, heads))
    return tuple(require_floats(args.lse, args.names.lse, args.query.device, allowed).shape)


def _byte_strides(part: str, tensor: torch.Tensor | None) -> dict[str, int]:
    """Return the strides of pages, tokens and heads in bytes; 0 without a tensor."""
    names = [f"{part}_{axis}_stride" for axis in ("page", "token", "head")]
    if tensor is None:
        return dict.fromkeys(names, 0)
    bytes_of = tensor.element_size()
    return {
        name: stride * bytes_of for name, stride in zip(names, tensor.stride()[:3], strict=True)
    }


def _offset(kv: torch.Tensor | None) -> int:
    if kv is None or kv.shape[1] == 1:
        return 0
    return kv.stride(1) * kv.element_size()
