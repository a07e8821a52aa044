"""Sparse MLA decode over the two pools of DeepSeek-V4, with the signature in ``flashinfer.mla``."""

from __future__ import annotations

import math

import torch

from mlagen.entry_point import OUT_AND_LSE, entry_point
from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import (
    check_counter_buffer,
    chooses_batch_invariant,
    dense_target,
    is_pdl_enabled,
    reject,
    reject_unserved,
    require,
    require_choice,
    require_dims,
    require_index,
    require_served,
    require_tensor,
    require_whole_number,
    shown,
    unwrap_sinks,
)
from mlagen.families.common.memory import require_memory, require_plain
from mlagen.families.dispatch import MLA
from mlagen.families.mla.args import MlaArgNames, MlaArgs
from mlagen.families.mla.pools import check_pool
from mlagen.families.mla.two_pools import FORMATS, UNSERVED_FORMATS, kv_format_of
from mlagen.spec.dtype import EXTRA_ROW_FORMATS, ROW_FORMATS
from mlagen.spec.mla.variant import MAX_HEADS
from mlagen.spec.rows import RowFormat
from mlagen.torch_ops.outputs import dsv4_output
from mlagen.torch_ops.traced import Op

_ELEMENTS = 512  # of a token; all are also values

_NAMES = MlaArgNames(
    kv_cache="swa_kv_cache", block_tables="sparse_indices", top_k_lens="swa_topk_lens"
)

_ROWS = (ROW_FORMATS, EXTRA_ROW_FORMATS)  # of both pools
_LAYOUTS = ("HND", "NHD")
_BACKENDS = ("auto", "sparse")
# Parameters of other backends whose default is not None.
_UNSERVED = {"hca_is_causal": True, "hca_use_persistent": False, "sparse_topk_lens_offset": 0}
_UNSERVED_BACKENDS = ("trtllm-gen", "cute-dsl", "cake")


def _row_widths() -> list[int]:
    """Return the bytes of a row in every format."""
    rows = [formats[dtype] for dtype in FORMATS.values() for formats in _ROWS]
    return list(
        {row.row_bytes(_ELEMENTS): None for row in rows} | dict.fromkeys(UNSERVED_FORMATS.values())
    )


def _checked_query(value: object) -> torch.Tensor:
    """Return the query as ``[batch, q_len, heads, 512]``."""
    query = require_tensor(value, "query")
    require_memory(query, "query")
    require_dims(query, "query", (3, 4))
    if query.dtype is not torch.bfloat16:
        rule = "not implemented, expected torch.bfloat16"
        raise UnsupportedError(f"query.dtype: {rule}, got {query.dtype}")
    width, heads = query.shape[-1], query.shape[-2]
    require(width == _ELEMENTS, "query.shape[-1]", f"{_ELEMENTS} (elements of a token)", width)
    require(heads >= 1, "query.shape[-2]", f"1 to {MAX_HEADS} heads", heads)
    if heads > MAX_HEADS:
        rule = f"not implemented, expected 1 to {MAX_HEADS} heads"
        raise UnsupportedError(f"query.shape[-2]: {rule}, got {heads}")
    return query.unsqueeze(1) if query.dim() == 3 else query


def _pages_of(
    value: object, argument: str, row: RowFormat, query: torch.Tensor, kv_layout: str
) -> torch.Tensor:
    """Return a pool as ``[pages, page_size, row bytes]``."""
    cache = require_tensor(value, argument)
    require_memory(cache, argument)
    width, given = row.row_bytes(_ELEMENTS), cache.shape[-1] if cache.dim() else 0
    if given != width and given in _row_widths():
        others = " or ".join(str(each) for each in _row_widths() if each != width)
        rule = f"{width} (bytes of a row; {others} are of another kv_cache_format)"
        reject(f"{argument}.shape[-1]", rule, given)
    return check_pool(
        cache,
        argument,
        row,
        _ELEMENTS,
        query.device,
        kv_layout=kv_layout,
        counts_padding=row.has_inline_scales,
    ).cache


def _checked_indices(value: object, argument: str) -> torch.Tensor:
    indices = require_tensor(value, argument)
    require_plain(indices, argument)
    require_dims(indices, argument, (2, 3))
    return indices


def _reject_others(backend: object, lengths: dict[str, object], **given: object) -> None:
    """Reject another backend, lengths of its tables, and what only others of FlashInfer have."""
    require_served(backend, "backend", _BACKENDS, _UNSERVED_BACKENDS)
    for name, value in lengths.items():
        if value is not None:
            rule = "not implemented, expected None (the lengths are swa_topk_lens)"
            raise UnsupportedError(f"{name}: {rule}, got {shown(value)}")
    for name, value in given.items():
        reject_unserved(name, value, _UNSERVED.get(name))


@entry_point(MLA, outputs="out lse", returns=OUT_AND_LSE, op=Op(output=dsv4_output, has_lse=True))
def trtllm_batch_decode_sparse_mla_dsv4(
    query: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    sparse_indices: torch.Tensor | None = None,
    compressed_kv_cache: torch.Tensor | None = None,
    sparse_topk_lens: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    kv_layout: str = "HND",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    enable_pdl: bool | None = None,
    swa_topk_lens: torch.Tensor | None = None,
    extra_sparse_indices: torch.Tensor | None = None,
    extra_sparse_topk_lens: torch.Tensor | None = None,
    backend: str = "auto",
    hca_swa_indices: torch.Tensor | None = None,
    hca_compressed_block_tables: torch.Tensor | None = None,
    hca_seq_lens: torch.Tensor | None = None,
    hca_is_causal: bool = True,
    hca_use_persistent: bool = False,
    hca_sparse_indices_format: str | None = None,
    remapped_sparse_indices_buffer: torch.Tensor | None = None,
    sparse_indices_are_storage_offsets: bool | None = None,
    dsv4_inv_rope_cos_sin_cache: torch.Tensor | None = None,
    dsv4_output_scale: torch.Tensor | None = None,
    sparse_topk_lens_offset: int = 0,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    *,
    kv_cache_format: str = "fp8",
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    return_lse_base: str = "base2",
    batch_invariant: bool | None = None,
) -> MlaArgs:
    """Decode one step of DeepSeek-V4's sparse attention over one or two pools of quantized rows.

    Query token ``t`` attends to the tokens at the valid ones of its first ``swa_topk_lens[t]``
    indices into the pool of the sliding window, and likewise of ``extra_sparse_topk_lens[t]``
    indices into the pool of compressed tokens, in one softmax and without a causal mask. A token is
    both key and value: all 512 elements, the rotated last 64 included. Lengths are clamped to the
    width of their indices, invalid indices are skipped wherever they are, and an index that is
    there twice counts twice. A query token that attends to nothing gives zeros, and its sink as
    LSE, or minus infinity without one. Memory that no index names affects no result. Tensors on the
    CPU use a slow PyTorch backend with the same checks. The call does not synchronize with the
    device.

    Parameters
    ----------
    query : bf16 [tokens, heads, 512] or [batch, q_len, heads, 512]
        1 to 256 heads; strides between heads and tokens are multiples of 16 bytes.
    swa_kv_cache : uint8 [pages, page_size, row bytes]
        The pool of the sliding window, of 584-byte rows unless ``kv_cache_format`` says otherwise:
        448 e4m3, 64 bf16, and 7 powers of two (UE8M0) as scales of 64 elements each, with a byte of
        padding. A page has all its data rows of 576 bytes first, then all its scale rows of 8. With
        an axis of size 1 as ``kv_layout`` says, or without. Pages are any multiple of 16 bytes
        apart.
    sparse_indices : int32 or uint32 [tokens, top_k], [tokens, 1, top_k] or [batch, q_len, top_k]
        Required. Indices into ``swa_kv_cache``: ``page * page_size + slot``; top_k is 1 or more.
        Rows may be slices of wider ones, and do not overlap.
    compressed_kv_cache : uint8 [pages, page_size, row bytes]
        The pool of compressed tokens, with its own pages and ``page_size``; not read without
        ``extra_sparse_indices`` and ``extra_sparse_topk_lens``.
    sparse_topk_lens, seq_lens : None
        Of a combined table, which is not implemented.
    out : bf16, shape of query
        Allocated if None. One with gaps between heads or tokens takes a copy.
    bmm1_scale : float or fp32 tensor of one element
        The factor of the scores.
    bmm2_scale : float or fp32 tensor of one element
        Multiplies the output.
    sinks : fp32, bf16 or fp16 [heads], or a list of one such tensor
        Natural-domain logits that join the denominator without a value; minus infinity is none.
    kv_layout : str
        ``HND``: an axis of size 1 before the tokens of a page; ``NHD``: after them.
    cum_seq_lens_q, max_q_len : int32 or uint32 tensor, int
        Not used: query tokens have indices of their own.
    swa_topk_lens : int32 or uint32 [tokens] or [batch, q_len]
        Required. Lengths of ``sparse_indices``, without gaps.
    extra_sparse_indices : int32 or uint32, as sparse_indices
        Indices into ``compressed_kv_cache``, of any other width.
    extra_sparse_topk_lens : int32 or uint32, as swa_topk_lens
        Lengths of ``extra_sparse_indices``; required with them.
    backend : str
        ``auto`` or ``sparse``, without a difference.
    hca_swa_indices, hca_compressed_block_tables, hca_seq_lens, hca_is_causal, hca_use_persistent
        None or the default: of FlashInfer's cute-dsl backend, as ``hca_sparse_indices_format``.
    remapped_sparse_indices_buffer, sparse_indices_are_storage_offsets : None
        Of FlashInfer's trtllm-gen backend, which needs them for strided pools; not implemented.
    dsv4_inv_rope_cos_sin_cache, dsv4_output_scale : None
        A fused epilogue; not implemented.
    sparse_topk_lens_offset : int
        0; of FlashInfer's cake backend.
    multi_ctas_kv_counter_buffer : torch.Tensor
        Ignored and unchanged.
    kv_cache_format : str
        ``fp8`` as above. DeepSeek-V4.1's ``fp8_dsv41``: 528-byte rows of 512 e4m3 with 16 scales
        (UE8M0) in both pools. ``fp8_dsv41_fp4_ca``: ``compressed_kv_cache`` has 288-byte rows of
        512 e2m1 with 32 e4m3 scales. ``fp8_dsv41_inline`` and ``fp8_dsv41_inline_fp4_ca``: every
        row has its scales behind its codes, tokens are any multiple of 16 bytes apart, pages a
        multiple of that, and the padding of pages counts as rows: an index is
        ``page * (page stride / token stride) + slot``, and one of padding is skipped. Of two e2m1
        codes in a byte the lower four bits are the first.
    lse : fp32 [tokens, heads] or [batch, q_len, heads]
        Written with ``return_lse``; allocated if None, in the shape of the query. One with gaps
        between tokens takes a copy; heads are adjacent.
    return_lse : bool
        Whether to return the LSE, too.
    return_lse_base : str
        ``base2`` or ``basee``: log2 or natural logarithm.
    workspace_buffer, enable_pdl, batch_invariant
        As for :func:`mlagen.mla.trtllm_batch_decode_with_kv_cache_mla`.

    Returns
    -------
    torch.Tensor
        ``out``, or ``(out, lse)``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; no kernel is launched, and the outputs are unchanged.
    UnsupportedError
        If no kernel supports dtype, heads, format, backend or a keyword.
    CaptureError
        If the kernel is not loaded yet during CUDA graph capture.

    Notes
    -----
    Signature of ``flashinfer.mla.trtllm_batch_decode_sparse_mla_dsv4``, also named
    ``batch_decode_sparse_mla_dsv4`` there and here, with the semantics of its ``sparse`` backend;
    ``lse``, ``return_lse``, ``return_lse_base`` and ``batch_invariant`` are mlagen's own.
    """
    _reject_others(
        backend,
        {"sparse_topk_lens": sparse_topk_lens, "seq_lens": seq_lens},
        hca_swa_indices=hca_swa_indices,
        hca_compressed_block_tables=hca_compressed_block_tables,
        hca_seq_lens=hca_seq_lens,
        hca_is_causal=hca_is_causal,
        hca_use_persistent=hca_use_persistent,
        hca_sparse_indices_format=hca_sparse_indices_format,
        remapped_sparse_indices_buffer=remapped_sparse_indices_buffer,
        sparse_indices_are_storage_offsets=sparse_indices_are_storage_offsets,
        dsv4_inv_rope_cos_sin_cache=dsv4_inv_rope_cos_sin_cache,
        dsv4_output_scale=dsv4_output_scale,
        sparse_topk_lens_offset=sparse_topk_lens_offset,
    )
    dtype = kv_format_of(kv_cache_format)
    layout = require_choice(kv_layout, "kv_layout", _LAYOUTS)
    check_counter_buffer(multi_ctas_kv_counter_buffer, query)
    rows = _checked_query(query)
    if cum_seq_lens_q is not None:
        offsets = require_tensor(cum_seq_lens_q, "cum_seq_lens_q")
        require_index(offsets, "cum_seq_lens_q", query.device)
    if max_q_len is not None:
        require_whole_number(max_q_len, "max_q_len")
    indices = _checked_indices(sparse_indices, "sparse_indices")
    cache = _pages_of(swa_kv_cache, "swa_kv_cache", ROW_FORMATS[dtype], query, layout)
    width, extra_cache = indices.shape[-1], None
    if extra_sparse_indices is not None or extra_sparse_topk_lens is not None:
        width += _checked_indices(extra_sparse_indices, "extra_sparse_indices").shape[-1]
        require_tensor(extra_sparse_topk_lens, "extra_sparse_topk_lens")
        extra_row, name = EXTRA_ROW_FORMATS[dtype], "compressed_kv_cache"
        extra_cache = _pages_of(compressed_kv_cache, name, extra_row, query, layout)
    leading = tuple(query.shape[:-1])
    per_token = (math.prod(leading[:-1]), leading[-1])
    return MlaArgs(
        query=rows,
        kv_cache=cache,
        workspace_buffer=workspace_buffer,
        kv_lora_rank=_ELEMENTS,
        qk_rope_head_dim=0,
        block_tables=indices,
        seq_lens=None,
        max_seq_len=width,
        out=dense_target(out, "out", query, torch.bfloat16, (tuple(query.shape),)),
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=unwrap_sinks(sinks),
        lse=dense_target(lse, "lse", query, torch.float32, (leading, per_token)),
        return_lse=return_lse,
        return_lse_base=return_lse_base,
        top_k=indices.shape[-1],
        top_k_lens=swa_topk_lens,
        out_shape=tuple(query.shape),
        kv_cache_format=dtype.value,
        extra_cache=extra_cache,
        extra_indices=extra_sparse_indices,
        extra_top_k_lens=extra_sparse_topk_lens,
        enable_pdl=is_pdl_enabled(enable_pdl),
        batch_invariant=chooses_batch_invariant(batch_invariant),
        names=_NAMES,
    )


batch_decode_sparse_mla_dsv4 = trtllm_batch_decode_sparse_mla_dsv4
