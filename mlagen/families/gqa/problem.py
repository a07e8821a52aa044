"""Validation of one grouped-query decode call, and the problem that it describes.

No check reads the contents of a tensor, so a result holds for every call with the same shapes,
strides, dtypes and devices. Every check raises :class:`ArgumentError`, whose message has the
caller's name of the argument. K and V pages are two tensors or one, with heads after the tokens of
a page (NHD) or before (HND).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from mlagen.families.common.arguments import (
    ALIGNMENT_BYTES,
    DTYPES,
    check_token_stride,
    reject,
    reject_dtype,
    require,
    require_aligned,
    require_aligned_pointer,
    require_contiguous,
    require_dense_last_dim,
    require_device,
    require_dims,
    require_dtype,
    require_floats,
    require_index,
    require_ints,
    require_shape,
    require_tensor,
)
from mlagen.families.common.launchers import LSE_FACTORS
from mlagen.families.common.problem import Problem, checked_tables, require_scratch_and_scales
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.sparse import MAX_TOKENS, check_head_tables, check_sparse
from mlagen.spec.dtype import TOKEN_HEAD_ELEMENTS, DType
from mlagen.spec.gqa.variant import NVFP4_BLOCK, GqaVariant, require_supported

# Cache dtypes besides the dtype of the query.
QUANTIZED = {
    torch.float8_e4m3fn: DType.E4M3,
    torch.float8_e5m2: DType.E5M2,
    torch.int8: DType.INT8,
    torch.uint8: DType.NVFP4,
}
WITH_TOKEN_SCALES = {element: dtype for dtype, element in TOKEN_HEAD_ELEMENTS.items()}
SCALE_DTYPES = (torch.uint8, torch.float8_e4m3fn)
MASK_DTYPES = (torch.uint16, torch.uint32, torch.int32)

# cp.async copies NVFP4 rows that are no multiple of 16 bytes 8 bytes at a time, and rows with a
# scale of each token, which may lie behind them, 4 bytes.
NVFP4_ALIGNMENT_BYTES = 8
TOKEN_SCALE_ALIGNMENT_BYTES = 4
MASK_ALIGNMENT_BYTES = 4
GATE_ALIGNMENT_BYTES = 8  # of four elements

_DIM_STEP = 16  # of a value that is narrower than its key

_OUT_E4M3 = torch.float8_e4m3fn


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
    soft_cap: float
    cp_world: int
    cp_rank: int
    value_tables_offset: int  # bytes from a request's block table of keys to that of values
    num_indices: int  # of a query token and KV head in a sparse call
    has_index_counts: bool
    lse_factor: float  # from base 2 to the base of the LSE
    bmm2_scales_scores: bool
    takes_bmm2: bool

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


class Pair(NamedTuple):
    """Keys and values, or their scales, as ``[pages, page_size, kv_heads, elements]``."""

    key: torch.Tensor
    value: torch.Tensor


def check_problem(args: GqaArgs) -> GqaProblem:
    """Return the problem of ``args``, whose numbers are canonical.

    Raises UnsupportedError if no kernel supports the dtypes or head dimension on any device.
    """
    query = _checked_query(args)
    heads, head_dim = query.shape[-2:]
    caches = paged_caches(args)
    kv_heads, head_dim_vo = _check_caches(args, caches)
    scales = paged_scales(args, caches)
    batch, tokens, query_stride = _check_tokens(args, kv_heads)
    if args.has_head_tables:
        tables = check_head_tables(args, batch, kv_heads)
    elif args.block_tables is None and args.block_indices is not None:
        tables = args.block_indices
    else:
        tables = checked_tables(args, batch, (3,) if args.separate_page_ids else (2,))
    if args.separate_page_ids and args.block_indices is None:
        name = f"{args.names.block_tables}.shape[1]"
        require(tables.shape[1] == 2, name, "2 (of keys and of values)", tables.shape[1])
    _check_dcp(args, batch)
    indices = check_sparse(args, tokens, kv_heads, head_dim_vo)
    require_scratch_and_scales(args)
    if args.sinks is not None:
        allowed, why = ((heads,), (kv_heads, heads // kv_heads)), f"heads of {args.names.query}"
        require_floats(args.sinks, args.names.sinks, query.device, allowed, why)
    mask_words = _check_mask(args, batch, tokens)
    kv_dtype = QUANTIZED.get(caches.key.dtype, DTYPES[query.dtype])
    if has_token_scales(args):
        kv_dtype = WITH_TOKEN_SCALES[kv_dtype]
    out_dtype, out_shape = _check_out(args, kv_dtype, batch, head_dim_vo)
    lse_shape = out_shape[:-1]
    if args.lse is not None:
        shapes: tuple[tuple[int, ...], ...] = ((tokens, heads), tuple(query.shape[:-1]))
        if args.cum_seq_lens_q is None:
            shapes = (*shapes, (batch, args.q_len, heads))
        lse_shape = tuple(require_floats(args.lse, args.names.lse, query.device, shapes).shape)
    check_pointers(args)
    variant = GqaVariant(
        query_dtype=DTYPES[query.dtype],
        kv_dtype=kv_dtype,
        out_dtype=DType.E4M3 if out_dtype is _OUT_E4M3 else DTYPES[query.dtype],
        head_dim=head_dim,
        head_dim_vo=head_dim_vo,
        page_size=caches.key.shape[1],
        has_soft_cap=args.soft_cap != 0,
        has_dcp=args.causal_seqlens_kv_global is not None,
        separate_page_ids=args.separate_page_ids,
        batch_invariant=args.batch_invariant,
        sparse_block=args.sparse_block,
        has_output_gate=args.output_gate is not None,
        has_head_tables=args.has_head_tables,
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
            "block_tables_stride": _tables_stride(args, tables),
            **_byte_strides("key", caches.key),
            **_byte_strides("value", caches.value),
            **_byte_strides("key_scale", scales and scales.key),
            **_byte_strides("value_scale", scales and scales.value),
            "indices_stride": indices.stride,
            "indices_head_stride": indices.head_stride,
        },
        value_offset=_offset(args.key_cache) if args.value_cache is None else 0,
        value_scale_offset=_offset(args.key_scales) if args.value_scales is None else 0,
        score_factor=head_dim**-0.5 if args.scales_like_xqa else 1.0,
        soft_cap=args.soft_cap,
        cp_world=args.cp_world,
        cp_rank=args.cp_rank,
        value_tables_offset=tables.stride(1) * tables.itemsize if args.separate_page_ids else 0,
        num_indices=indices.width,
        has_index_counts=args.has_index_counts,
        lse_factor=LSE_FACTORS[args.return_lse_base],
        bmm2_scales_scores=args.scales_like_xqa and is_quantized,
        takes_bmm2=is_quantized or not args.scales_like_xqa,
    )


def check_pointers(args: GqaArgs, cache_alignment: int = 0) -> None:
    """Reject tensors with a misaligned base address; a kernel may need more of the cache."""
    names = args.names
    key, value = paged_caches(args)
    key_name, value_name = _cache_names(args)
    require_aligned_pointer(args.query, names.query)
    require_aligned_pointer(key, key_name, max(alignment_of(args, key), cache_alignment))
    require_aligned_pointer(value, value_name, max(alignment_of(args, value), cache_alignment))
    require_aligned_pointer(args.workspace_buffer, names.workspace_buffer)
    if args.out is not None:
        require_aligned_pointer(args.out, names.out)
    if args.mask is not None and args.q_len > 1:
        require_aligned_pointer(args.mask, names.mask, MASK_ALIGNMENT_BYTES)
    if args.output_gate is not None:
        require_aligned_pointer(args.output_gate, names.output_gate, GATE_ALIGNMENT_BYTES)


def has_token_scales(args: GqaArgs) -> bool:
    """Return whether a call has a scale of each token and KV head, as their dtype says."""
    return isinstance(args.key_scales, torch.Tensor) and args.key_scales.dtype is torch.float32


def alignment_of(args: GqaArgs, tensor: torch.Tensor) -> int:
    """Return the required alignment of every row of a cache, in bytes."""
    if has_token_scales(args):
        return TOKEN_SCALE_ALIGNMENT_BYTES
    if tensor.dtype is torch.uint8 and tensor.shape[-1] % ALIGNMENT_BYTES:
        return NVFP4_ALIGNMENT_BYTES
    return ALIGNMENT_BYTES


def paged_caches(args: GqaArgs) -> Pair:
    """Return views of keys and values, without copying."""
    names, name = args.names, _cache_names(args)[0]
    given = (names.kv_cache, names.key_cache, names.value_cache)
    key, value = _split(args.key_cache, args.value_cache, given, args, 4)
    allowed = (args.query.dtype, *QUANTIZED)
    require_dtype(key, name, allowed, f"the first is that of {names.query}")
    if args.value_cache is not None:
        require_dtype(value, names.value_cache, (key.dtype,), f"dtype of {names.key_cache}")
        like_key = (*key.shape[:-1], value.shape[-1])
        why = f"shape of {names.key_cache}, or another last dim"
        require_shape(value, names.value_cache, (like_key,), why)
    return Pair(_swapped(key, args.kv_layout), _swapped(value, args.kv_layout))


def paged_scales(args: GqaArgs, caches: Pair) -> Pair | None:
    """Return views of the scales of keys and values; None where the cache has none."""
    names, is_pair = args.names, args.value_scales is not None
    name = names.key_scales if is_pair else names.kv_scales
    is_nvfp4 = caches.key.dtype is torch.uint8
    if not is_nvfp4 and args.key_scales is None and not is_pair:
        return None
    if not is_nvfp4 and (caches.key.element_size() > 1 or not has_token_scales(args)):
        scales = "" if caches.key.element_size() > 1 else ", or fp32 of each token and KV head,"
        reject(name, f"None{scales} for a cache of {caches.key.dtype}", "a tensor")
    given = (names.kv_scales, names.key_scales, names.value_scales)
    pair = _split(args.key_scales, args.value_scales, given, args, 4 if is_nvfp4 else 3)
    parts = (name, names.value_scales if is_pair else name)
    for scale, part, cache in zip(pair, parts, caches, strict=True):
        *leading, packed = _swapped(cache, args.kv_layout).shape
        if is_nvfp4:
            shape = (*leading, packed * 2 // NVFP4_BLOCK)
            require_dtype(scale, part, SCALE_DTYPES)
            require_shape(scale, part, (shape,), f"one for {NVFP4_BLOCK} elements of the cache")
            require_dense_last_dim(scale, part)
        else:
            require_dtype(scale, part, (torch.float32,), f"dtype of {parts[0]}")
            require_shape(scale, part, (tuple(leading),), "one for a token and KV head")
    return Pair(*(_swapped(scale, args.kv_layout) for scale in pair))


def _cache_names(args: GqaArgs) -> tuple[str, str]:
    """Return the parameter names of keys and values."""
    names = args.names
    if args.value_cache is None:
        return names.kv_cache, names.kv_cache
    return names.key_cache, names.value_cache


def _split(
    first: object, second: object, names: tuple[str, str, str], args: GqaArgs, dims: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in the caller's layout, of so many dimensions each."""
    kv_name, key_name, value_name = names
    if second is None:
        kv = require_tensor(first, kv_name)
        require_device(kv, kv_name, args.query.device)
        require_dims(kv, kv_name, (dims + 1,))
        require(kv.shape[1] in {1, 2}, f"{kv_name}.shape[1]", "2, or 1 where K is V", kv.shape[1])
        return kv[:, 0], kv[:, -1]
    key, value = require_tensor(first, key_name), require_tensor(second, value_name)
    for tensor, name in ((key, key_name), (value, value_name)):
        require_device(tensor, name, args.query.device)
        require_dims(tensor, name, (dims,))
    return key, value


def _swapped(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a view with heads and tokens swapped, if the layout is HND."""
    return tensor if layout == "NHD" else tensor.transpose(1, 2)


def _checked_query(args: GqaArgs) -> torch.Tensor:
    """Return the query, if its layout matches ``q_len`` and ragged lengths."""
    name = args.names.query
    query = require_tensor(args.query, name)
    is_ragged = args.cum_seq_lens_q is not None
    if is_ragged and args.q_len == 1:
        reject(args.names.q_len, "2 or more with " + args.names.cum_seq_lens_q, 1)
    if is_ragged or not args.with_beam_axis:
        require_dims(query, name, (3,))
    else:
        require_dims(query, name, (5,) if args.q_len > 1 else (4, 5))
        require(query.shape[1] == 1, f"{name}.shape[1]", 1, query.shape[1])
        if query.dim() == 5:
            q_len = query.shape[2]
            expected = f"{args.q_len} ({args.names.q_len})"
            require(q_len == args.q_len, f"{name}.shape[2]", expected, q_len)
    require_dtype(query, name, tuple(DTYPES))
    require_dense_last_dim(query, name)
    require_aligned(query, name)
    require(query.shape[-2] >= 1, f"{name}.shape[-2]", "1 head or more", query.shape[-2])
    return query


def _tables_stride(args: GqaArgs, tables: torch.Tensor) -> int:
    """Return the elements between the block tables of requests."""
    return 0 if args.kv_indptr is not None else tables.stride(1 if args.has_head_tables else 0)


def _check_tokens(args: GqaArgs, kv_heads: int) -> tuple[int, int, int]:
    """Return the batch size, the query tokens, and the stride between query tokens."""
    names, query, q_len = args.names, args.query, args.q_len
    if args.seq_lens is None and args.token_to_req is not None:
        batch = require_tensor(args.block_tables, names.block_tables).shape[0]
        return batch, query.shape[0], query.stride(0)
    seq_lens = require_tensor(args.seq_lens, names.seq_lens)
    require_index(seq_lens, names.seq_lens, query.device)
    require_dims(seq_lens, names.seq_lens, (1, 2))
    require_contiguous(seq_lens, names.seq_lens)
    if args.cum_seq_lens_q is not None:
        batch, tokens = seq_lens.shape[-1 if args.has_head_tables else 0], query.shape[0]
        name, shape = names.cum_seq_lens_q, (batch + 1,)
        require_ints(args.cum_seq_lens_q, name, query.device, (shape,), "batch + 1")
        rule = f"{batch * q_len} or less (batch * {names.q_len})"
        require(tokens <= batch * q_len, f"{names.query}.shape[0]", rule, tokens)
    elif args.with_beam_axis:
        batch = query.shape[0]
        tokens = batch * q_len
    else:
        tokens = query.shape[0]
        multiple = f"a multiple of {q_len} ({names.q_len})"
        require(tokens % q_len == 0, f"{names.query}.shape[0]", multiple, tokens)
        batch = tokens // q_len
    if args.has_head_tables:
        require_shape(seq_lens, names.seq_lens, ((kv_heads, batch),), "KV heads, batch")
    else:
        require_shape(seq_lens, names.seq_lens, ((batch,), (batch, 1)), f"batch of {names.query}")
    if query.dim() != 5 or q_len == 1:
        return batch, tokens, query.stride(0)
    check_token_stride(query[:, 0], names.query)
    return batch, tokens, query.stride(2)


def _check_caches(args: GqaArgs, caches: Pair) -> tuple[int, int]:
    """Check sizes and strides of the caches, and return the KV heads, and elements of a value."""
    heads, head_dim = args.query.shape[-2:]
    is_nvfp4 = caches.key.dtype is torch.uint8
    names = _cache_names(args)
    name = names[0]
    _, page_size, kv_heads, width = caches.key.shape
    expected = head_dim // 2 if is_nvfp4 else head_dim
    why = f"head_dim of {args.names.query}" + (" / 2" if is_nvfp4 else "")
    require(width == expected, f"{name}.shape[-1]", f"{expected} ({why})", width)
    value_width = caches.value.shape[-1]
    if value_width != width:
        step = _DIM_STEP // 2 if is_nvfp4 else _DIM_STEP
        rule = f"a multiple of {step} up to {width} ({name}.shape[-1])"
        is_value = 0 < value_width < width and value_width % step == 0
        require(is_value, f"{names[1]}.shape[-1]", rule, value_width)
    require(page_size >= 1, name, "1 token or more in a page", page_size)
    require(kv_heads >= 1, name, "1 head or more", kv_heads)
    multiple = f"a multiple of {kv_heads} (heads of {name})"
    require(heads % kv_heads == 0, f"{args.names.query}.shape[-2]", multiple, heads)
    for cache, argument in zip(caches, names, strict=True):
        require_dense_last_dim(cache, argument)
        require_aligned(cache, argument, alignment_of(args, cache))
    return kv_heads, value_width * 2 if is_nvfp4 else value_width


def _check_dcp(args: GqaArgs, batch: int) -> None:
    """Reject what a rank of decode context parallel does not support."""
    lengths, name = args.causal_seqlens_kv_global, "causal_seqlens_kv_global"
    if lengths is None:
        return
    require_ints(lengths, name, args.query.device, ((batch,),), f"batch of {args.names.query}")
    require(args.mask is None, args.names.mask, f"None with {name}", "a mask")
    require(args.window == 0, args.names.window, f"no window with {name}", args.window)
    rule = f"one table for keys and values with {name}"
    require(not args.separate_page_ids, args.names.block_tables, rule, "two")


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


def _check_out(
    args: GqaArgs, kv_dtype: DType, batch: int, head_dim_vo: int
) -> tuple[torch.dtype, tuple[int, ...]]:
    query, name = args.query, args.names.out
    like_query = (*query.shape[:-1], head_dim_vo)
    split = (batch, args.q_len, *like_query[-2:])
    is_uniform = args.cum_seq_lens_q is None and not args.with_beam_axis
    allowed: tuple[torch.dtype, ...] = (query.dtype,)
    why = f"dtype of {args.names.query}; e4m3 only from a cache of e4m3"
    if kv_dtype.element is DType.E4M3:
        allowed, why = (query.dtype, _OUT_E4M3), f"the first is that of {args.names.query}"
    if args.out is None:
        dtype = args.out_dtype or query.dtype
        if dtype not in allowed:
            reject_dtype("out_dtype", f"{' or '.join(map(str, allowed))} ({why})", dtype)
        has_split = is_uniform and args.q_len > 1 and not args.is_out_like_query
        return dtype, split if has_split else like_query
    out = require_tensor(args.out, name)
    require_device(out, name, query.device)
    require_dtype(out, name, allowed, why)
    require_shape(out, name, (like_query, split) if is_uniform else (like_query,))
    require_contiguous(out, name)
    return out.dtype, tuple(out.shape)


def _byte_strides(part: str, tensor: torch.Tensor | None) -> dict[str, int]:
    """Return the strides of pages, tokens and heads in bytes; 0 without a tensor."""
    strides = (0, 0, 0) if tensor is None else tensor.stride()[:3]
    size = 0 if tensor is None else tensor.element_size()
    axes = zip(("page", "token", "head"), strides, strict=True)
    return {f"{part}_{axis}_stride": stride * size for axis, stride in axes}


def _offset(kv: torch.Tensor | None) -> int:
    if kv is None or kv.shape[1] == 1:
        return 0
    return kv.stride(1) * kv.element_size()
