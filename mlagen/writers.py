"""Writers of KV caches: normalize, rotate and quantize tokens, and append them to pages.

The functions have FlashInfer's names and arguments where it has them. On a GPU one kernel does all
of it, on other devices torch ops do, to the same bytes. No call waits for the device, so a
CUDA graph can capture it once its kernel is loaded.
"""

from __future__ import annotations

import torch

from mlagen.families.common.arguments import (
    ALIGNMENT_BYTES,
    DTYPES,
    FLOAT_DTYPES,
    reject,
    require,
    require_aligned_pointer,
    require_choice,
    require_contiguous,
    require_device,
    require_dims,
    require_dtype,
    require_flag,
    require_float32,
    require_floats,
    require_ints,
    require_shape,
    require_tensor,
    require_whole_number,
)
from mlagen.families.common.memory import require_writable
from mlagen.families.mla.pools import Pool, check_pool
from mlagen.families.mla.prologue import Prologue
from mlagen.families.mla.write import write, write_plain
from mlagen.families.mla.write_rows import (
    Elements,
    PagedPlaces,
    new_pages,
    split_elements,
)
from mlagen.spec.dtype import (
    DSV4_ROW,
    DSV41_FP4_ROW,
    DSV41_INLINE_FP4_ROW,
    DSV41_INLINE_ROW,
    DSV41_ROW,
    ROW_FORMATS,
    DType,
)
from mlagen.spec.rows import RowFormat
from mlagen.spec.write_rows import WriteRowsSpec
from mlagen.torch_ops.traced import writer

__all__ = [
    "append_paged_mla_kv_cache",
    "dsv4_fp8_quantize_append_sparse_mla_cache",
    "dsv4_fp8_quantize_pack_sparse_mla_cache",
    "dsv41_fp4_quantize_append_sparse_mla_cache",
    "dsv41_fp4_quantize_pack_sparse_mla_cache",
    "dsv41_fp8_quantize_append_sparse_mla_cache",
    "dsv41_fp8_quantize_pack_sparse_mla_cache",
    "mla_fp8_quantize_append_packed",
]

_LATENTS, _ROPES = 512, (64, 0)
_MLA_ROW, _PER_TOKEN_ROW = ROW_FORMATS[DType.FP8_DS_MLA], ROW_FORMATS[DType.FP8_PER_TOKEN]
_LAYOUTS = ("HND", "NHD")
_SLOT_DTYPES = (torch.int32, torch.int64)
_INT32 = (torch.int32,)


@writer(fake=lambda latent_kv, **layout: _new_pages(latent_kv, DSV4_ROW, **layout)[1])
def dsv4_fp8_quantize_pack_sparse_mla_cache(
    latent_kv: torch.Tensor, *, kv_layout: str = "HND", page_stride: int | None = None
) -> torch.Tensor:
    """Quantize whole pages of DeepSeek-V4's tokens into 584-byte rows.

    The first 448 elements of a token become e4m3 codes with a power of two for each 64; the last
    64, its rope part, stay bf16.

    Parameters
    ----------
    latent_kv : bf16 or fp16 [pages, page_size, 512]
        Tokens, with rope applied; an axis of size 1 may stand for the KV head.
    kv_layout : str
        ``HND`` or ``NHD``: where the result has an axis of size 1.
    page_stride : int, optional
        Bytes from page to page, a multiple of 16; the bytes of a page up to a multiple of 576 by
        default. Bytes between pages are not written.

    Returns
    -------
    torch.Tensor
        A cache ``uint8[pages, 1, page_size, 584]``, or ``[pages, page_size, 1, 584]``. A page has
        the data rows of all its tokens, 576 bytes each, and then their scale rows of 8 bytes.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.

    Notes
    -----
    FlashInfer has no writer of these rows; the name follows those that it has.
    """
    return _pack(latent_kv, DSV4_ROW, kv_layout, page_stride)


@writer(("cache",))
def dsv4_fp8_quantize_append_sparse_mla_cache(
    latent_kv: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
) -> None:
    """Quantize DeepSeek-V4's tokens, and append them to a cache of 584-byte rows.

    Only the bytes of the rows are written; the byte behind the seven scales of a token becomes 0.
    With ``norm_weight`` RMSNorm precedes that, and with ``cos_sin_cache`` rope, in the same launch.

    Parameters
    ----------
    latent_kv : bf16 or fp16 [n, 512]
        Tokens of any strides; an axis of size 1 may stand for the KV head.
    slot_mapping : int32 or int64 [m]
        Slot of each of the first ``m`` tokens, ``page * page_size + entry``; the other tokens are
        padding. A negative slot, or one behind the cache, skips its token. Of equal slots that of
        the first token counts.
    cache : uint8 [pages, page_size, 584]
        The cache, with an axis of size 1 for the KV head or none; pages may have any stride that is
        a multiple of 16 bytes.
    norm_weight : dtype of the tokens [512], optional
        Weight of an RMSNorm of the 512 elements; without it tokens are normalized already.
    norm_eps : float
        Added to the mean of their squares.
    positions : int32 or int64 [n], optional
        Row of ``cos_sin_cache`` for each token. One that it does not have gives NaN.
    cos_sin_cache : fp32 [max_position, 64], optional
        The cosines of 32 angles, and then their sines, for the rope of the last 64 elements: each
        angle rotates two neighbors. Without it rope is applied already.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; nothing is written.

    Notes
    -----
    FlashInfer has no writer of these rows; the name follows those that it has. The bytes are those
    of RMSNorm, rope and this function one after the other: each computes in fp32, and rounds to the
    dtype of the tokens once. vLLM's ``fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`` rotates
    and appends by the same rules, and prepares queries too.
    """
    prologue = (norm_weight, norm_eps, positions, cos_sin_cache)
    _append(latent_kv, slot_mapping, cache, DSV4_ROW, *prologue)


@writer(
    fake=lambda latent_kv, kv_layout, inline_scale: _new_pages(
        latent_kv, _dsv41_row(inline_scale), kv_layout
    )[1]
)
def dsv41_fp8_quantize_pack_sparse_mla_cache(
    latent_kv: torch.Tensor, *, kv_layout: str = "HND", inline_scale: bool = False
) -> torch.Tensor:
    """Quantize whole pages of DeepSeek-V4.1's tokens into 528-byte rows.

    All elements, the rope part too, become e4m3 codes with a power of two for each 32.

    Parameters
    ----------
    latent_kv, kv_layout
        As for :func:`dsv4_fp8_quantize_pack_sparse_mla_cache`.
    inline_scale : bool
        Whether the scales of a token follow its data, as in caches of ``fp8_dsv41_inline``; else a
        page has the data rows of all its tokens, 512 bytes each, and then their scale rows.

    Returns
    -------
    torch.Tensor
        A contiguous cache ``uint8[pages, 1, page_size, 528]``, or ``[pages, page_size, 1, 528]``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.

    Notes
    -----
    Signature of ``flashinfer.mla.dsv41_fp8_quantize_pack_sparse_mla_cache``, and its bytes.
    """
    return _pack(latent_kv, _dsv41_row(inline_scale), kv_layout)


@writer(("cache",))
def dsv41_fp8_quantize_append_sparse_mla_cache(
    latent_kv: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    *,
    inline_scale: bool = False,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
) -> None:
    """Quantize DeepSeek-V4.1's tokens, and append them to a cache of 528-byte rows.

    Only the bytes of the rows are written. RMSNorm and rope may precede that, in the same launch.

    Parameters
    ----------
    latent_kv, norm_weight, norm_eps, positions, cos_sin_cache
        As for :func:`dsv4_fp8_quantize_append_sparse_mla_cache`.
    slot_mapping : int32 or int64 [m]
        As there; inline a slot is the number of a row of the cache, ``page * (page stride // row
        stride) + entry``.
    cache : uint8 [pages, page_size, 528]
        The cache, with an axis of size 1 for the KV head or none; pages may have any stride that is
        a multiple of 16 bytes. Inline, so may rows, and a page is a whole number of them.
    inline_scale : bool
        Whether the scales of a token follow its data.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; nothing is written.

    Notes
    -----
    Signature of ``flashinfer.mla.dsv41_fp8_quantize_append_sparse_mla_cache``, and its bytes;
    RMSNorm and rope are mlagen's.
    """
    prologue = (norm_weight, norm_eps, positions, cos_sin_cache)
    _append(latent_kv, slot_mapping, cache, _dsv41_row(inline_scale), *prologue)


@writer(
    fake=lambda latent_kv, kv_layout, inline_scale: _new_pages(
        latent_kv, _dsv41_fp4_row(inline_scale), kv_layout
    )[1]
)
def dsv41_fp4_quantize_pack_sparse_mla_cache(
    latent_kv: torch.Tensor, *, kv_layout: str = "HND", inline_scale: bool = False
) -> torch.Tensor:
    """Quantize whole pages of DeepSeek-V4.1's compressed tokens into 288-byte rows.

    All elements become e2m1 codes, two in a byte, with an e4m3 scale for each 16.

    Parameters
    ----------
    latent_kv, kv_layout, inline_scale
        As for :func:`dsv41_fp8_quantize_pack_sparse_mla_cache`; a data row has 256 bytes, and
        inline rows are those of ``fp8_dsv41_inline_fp4_ca``.

    Returns
    -------
    torch.Tensor
        A contiguous cache ``uint8[pages, 1, page_size, 288]``, or ``[pages, page_size, 1, 288]``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.

    Notes
    -----
    Signature of ``flashinfer.mla.dsv41_fp4_quantize_pack_sparse_mla_cache``.
    """
    return _pack(latent_kv, _dsv41_fp4_row(inline_scale), kv_layout)


@writer(("cache",))
def dsv41_fp4_quantize_append_sparse_mla_cache(
    latent_kv: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    *,
    inline_scale: bool = False,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
) -> None:
    """Quantize DeepSeek-V4.1's compressed tokens, and append them to a cache of 288-byte rows.

    Only the bytes of the rows are written. RMSNorm and rope may precede that, in the same launch.

    Parameters
    ----------
    latent_kv, slot_mapping, inline_scale, norm_weight, norm_eps, positions, cos_sin_cache
        As for :func:`dsv41_fp8_quantize_append_sparse_mla_cache`.
    cache : uint8 [pages, page_size, 288]
        As there, of rows of another width.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; nothing is written.

    Notes
    -----
    Signature of ``flashinfer.mla.dsv41_fp4_quantize_append_sparse_mla_cache``; RMSNorm and rope are
    mlagen's.
    """
    prologue = (norm_weight, norm_eps, positions, cos_sin_cache)
    _append(latent_kv, slot_mapping, cache, _dsv41_fp4_row(inline_scale), *prologue)


@writer(("cache", "scales"))
def mla_fp8_quantize_append_packed(
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
) -> None:
    """Quantize tokens of MLA, and append them to a cache of 656-, 528- or 640-byte rows.

    Without ``scales`` a row is that of DeepSeek-V3.2, ``fp8_ds_mla``: 512 e4m3 codes, an fp32 scale
    for each 128 of them, and a bf16 rope part if any. With ``scales`` it has 512 e4m3 codes and a
    bf16 rope part, all of them to be multiplied by the scale of the token. RMSNorm of the latents
    and rope may precede that, in the same launch.

    Parameters
    ----------
    ckv : bf16 or fp16 [n, 512]
        Latents of the tokens.
    kpe : bf16 or fp16 [n, 64] or [n, 0]
        Rope parts of the dtype of ``ckv``.
    slot_mapping : int32 or int64 [m]
        Slot of each of the first ``m`` tokens, as for
        :func:`dsv4_fp8_quantize_append_sparse_mla_cache`.
    cache : uint8 [pages, page_size, 656]
        The cache, of ``[.., 528]`` or wider without rope parts, and ``[.., 640]``, also e4m3, with
        ``scales``; with an axis of size 1 for the KV head or none. Strides are multiples of 16
        bytes.
    scales : fp32 [pages, page_size], optional
        Scales of the tokens in ``cache``, written too.
    norm_weight, norm_eps : dtype of the tokens [512], and float, optional
        RMSNorm of ``ckv``, as for :func:`dsv4_fp8_quantize_append_sparse_mla_cache`.
    positions, cos_sin_cache : int32 or int64 [n], and fp32 [max_position, 64], optional
        Rope of ``kpe``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; nothing is written.

    Notes
    -----
    FlashInfer has no writer of these rows.
    """
    ckv = _checked_tokens(ckv, "ckv", (_LATENTS,))
    kpe = _checked_tokens(kpe, "kpe", _ROPES if scales is None else _ROPES[:1])
    require_device(kpe, "kpe", ckv.device)
    require_dtype(kpe, "kpe", (ckv.dtype,), "dtype of ckv")
    require_shape(kpe, "kpe", ((len(ckv), kpe.shape[-1]),), "tokens of ckv")
    elements = Elements(ckv, kpe)
    row = _MLA_ROW if scales is None else _PER_TOKEN_ROW
    dtypes = (torch.uint8,) if scales is None else (torch.uint8, torch.float8_e4m3fn)
    pool = check_pool(cache, "cache", row, elements.width, ckv.device, dtypes=dtypes)
    if scales is not None:
        require_device(require_tensor(scales, "scales"), "scales", ckv.device)
        require_dtype(scales, "scales", (torch.float32,))
        require_shape(scales, "scales", (tuple(pool.cache.shape[:2]),), "pages, page_size")
        require_writable(scales, "scales")
    has_rope = positions is not None or cos_sin_cache is not None
    require(bool(kpe.shape[1]) or not has_rope, "kpe.shape[-1]", "64 for rope", 0)
    given = (norm_weight, norm_eps, positions, cos_sin_cache)
    prologue = _checked_prologue(elements, row.value_elements, "ckv", *given)
    _append_rows(elements, slot_mapping, pool, row, scales, prologue)


@writer(("ckv_cache", "kpe_cache"))
def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    cos_sin_cache: torch.Tensor | None = None,
) -> None:
    """Append tokens of MLA to a paged cache of their dtype, without quantizing them.

    RMSNorm of the latents and rope may precede that. One kernel does all of it if the tokens have
    16 bits, 512 latent elements with 64 or none of rope or 256 with 64, and places of 16 bytes.

    Parameters
    ----------
    append_ckv : bf16, fp16 or e4m3 [n, rank]
        Latents of the tokens.
    append_kpe : [n, rope dim]
        Rope parts of the dtype of ``append_ckv``.
    batch_indices : int32 [n]
        Request of each token. A token of no request, such as -1, is skipped.
    positions : int32 [n]
        Position of each token in its request; one that no page of the request has is skipped. Of
        tokens at one place the first counts.
    ckv_cache : [pages, page_size, rank]
        Latents of the cache, of the dtype of ``append_ckv`` and any strides.
    kpe_cache : [pages, page_size, rope dim]
        Rope parts of the cache.
    kv_indices : int32 [num_indices]
        Page ids of all requests.
    kv_indptr : int32 [batch + 1]
        Range of each request in ``kv_indices``.
    kv_last_page_len : int32 [batch]
        Checked, and not read: the positions say where tokens are.
    norm_weight, norm_eps : dtype of the tokens [rank], and float, optional
        RMSNorm of the latents, of rank 512 or 256, as for
        :func:`dsv4_fp8_quantize_append_sparse_mla_cache`.
    cos_sin_cache : fp32 [max_position, 64], optional
        Rope of the rope parts, of dim 64, at ``positions``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; nothing is written.

    Notes
    -----
    Signature of ``flashinfer.page.append_paged_mla_kv_cache``, for any dims; RMSNorm and rope are
    mlagen's.
    """
    ckv = _checked_rows(append_ckv, "append_ckv", None)
    _checked_rows(append_kpe, "append_kpe", ckv)
    _check_cache(ckv_cache, "ckv_cache", append_ckv)
    num_pages, page_size = ckv_cache.shape[:2]
    _check_cache(kpe_cache, "kpe_cache", append_kpe, (num_pages, page_size))
    for name, tensor in (("batch_indices", batch_indices), ("positions", positions)):
        require_ints(tensor, name, ckv.device, ((len(ckv),),), "tokens", _INT32)
    for name, tensor in (("kv_indices", kv_indices), ("kv_indptr", kv_indptr)):
        require_dims(require_tensor(tensor, name), name, (1,))
        require_ints(tensor, name, ckv.device, (tuple(tensor.shape),), dtypes=_INT32)
    require(len(kv_indptr) >= 1, "kv_indptr.shape", "[batch + 1]", list(kv_indptr.shape))
    name, shape = "kv_last_page_len", (len(kv_indptr) - 1,)
    require_ints(kv_last_page_len, name, ckv.device, (shape,), "batch", _INT32)
    elements = Elements(ckv.detach(), append_kpe.detach())
    rope = (None, None) if cos_sin_cache is None else (positions, cos_sin_cache)
    prologue = _checked_prologue(elements, ckv.shape[1], "append_ckv", norm_weight, norm_eps, *rope)
    if prologue is not None:
        prologue = prologue._replace(positions=positions)
        require_dtype(ckv, "append_ckv", tuple(DTYPES), "with norm_weight or cos_sin_cache")
        _check_dims(prologue, elements)
    if not (len(ckv) and shape[0] and len(kv_indices) and num_pages * page_size):
        return
    places = PagedPlaces(batch_indices, positions, kv_indices, kv_indptr)
    caches = ckv_cache.detach(), kpe_cache.detach()
    write_plain(elements, caches, places, prologue)


def _check_dims(prologue: Prologue, elements: Elements) -> None:
    latent, rope = (part.shape[1] for part in elements)
    if prologue.norm_weight is not None:
        require(latent in {512, 256}, "append_ckv.shape[-1]", "512 or 256 with norm_weight", latent)
    if prologue.cos_sin_cache is not None:
        rope_elements = WriteRowsSpec.rope_elements
        rule = f"{rope_elements} with cos_sin_cache"
        require(rope == rope_elements, "append_kpe.shape[-1]", rule, rope)


def _checked_rows(value: object, argument: str, like: torch.Tensor | None) -> torch.Tensor:
    """Return tokens ``[n, dim]`` of a plain dtype, that of other tokens if there are any."""
    rows = require_tensor(value, argument)
    require_dims(rows, argument, (2,))
    require_dtype(rows, argument, tuple(FLOAT_DTYPES) if like is None else (like.dtype,))
    if like is not None:
        require_device(rows, argument, like.device)
        require_shape(rows, argument, ((len(like), rows.shape[1]),), "tokens of append_ckv")
    return rows


def _check_cache(
    value: object, argument: str, rows: torch.Tensor, pages: tuple[int, int] | None = None
) -> None:
    cache = require_tensor(value, argument)
    require_device(cache, argument, rows.device)
    require_dims(cache, argument, (3,))
    require_dtype(cache, argument, (rows.dtype,), "dtype of append_ckv")
    expected = (*(pages or cache.shape[:2]), rows.shape[1])
    require_shape(cache, argument, (expected,), "pages, page_size, elements of a token")
    require_writable(cache, argument)


def _dsv41_row(inline_scale: object) -> RowFormat:
    return DSV41_INLINE_ROW if require_flag(inline_scale, "inline_scale") else DSV41_ROW


def _dsv41_fp4_row(inline_scale: object) -> RowFormat:
    return DSV41_INLINE_FP4_ROW if require_flag(inline_scale, "inline_scale") else DSV41_FP4_ROW


def _pack(latent_kv: object, row: RowFormat, *layout: object) -> torch.Tensor:
    """Return new pages of packed tokens."""
    tokens, cache = _new_pages(latent_kv, row, *layout)
    if tokens.numel():
        pages = cache.squeeze(1 if cache.shape[1] == 1 else 2)
        pool = check_pool(pages, "cache", row, _LATENTS, tokens.device)
        write(split_elements(tokens.flatten(0, 1), row), None, pool, row)
    return cache


def _new_pages(
    latent_kv: object, row: RowFormat, kv_layout: object = "HND", page_stride: object = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens ``[pages, page_size, elements]``, and their cache; a compiler traces it."""
    layout = require_choice(kv_layout, "kv_layout", _LAYOUTS)
    tokens = _checked_tokens(latent_kv, "latent_kv", (_LATENTS,), dims=3)
    stride = 0
    if page_stride is not None:
        page_bytes = tokens.shape[1] * row.row_bytes(_LATENTS)
        stride = require_whole_number(page_stride, "page_stride", min_value=page_bytes)
        is_valid = stride % ALIGNMENT_BYTES == 0
        require(is_valid, "page_stride", f"a multiple of {ALIGNMENT_BYTES}", stride)
    return tokens, new_pages(tokens, row, stride).unsqueeze(_LAYOUTS.index(layout) + 1)


def _append(
    latent_kv: object, slot_mapping: object, cache: object, row: RowFormat, *prologue: object
) -> None:
    tokens = _checked_tokens(latent_kv, "latent_kv", (_LATENTS,))
    counts_padding = row.has_inline_scales
    pool = check_pool(cache, "cache", row, _LATENTS, tokens.device, counts_padding=counts_padding)
    elements = split_elements(tokens, row)
    checked = _checked_prologue(elements, row.value_elements, "latent_kv", *prologue)
    _append_rows(elements, slot_mapping, pool, row, prologue=checked)


def _checked_prologue(
    elements: Elements,
    norm_elements: int,
    tokens: str,
    norm_weight: object,
    norm_eps: object,
    positions: object,
    cos_sin_cache: object,
) -> Prologue | None:
    """Return RMSNorm and rope of the tokens of an argument; None if neither is wanted."""
    device, dtype = elements.scaled.device, elements.scaled.dtype
    eps = require_float32(norm_eps, "norm_eps")
    weight = None
    if norm_weight is not None:
        name, weight = "norm_weight", require_tensor(norm_weight, "norm_weight").detach()
        require_device(weight, name, device)
        require_dtype(weight, name, (dtype,), f"dtype of {tokens}")
        require_shape(weight, name, ((norm_elements,),))
        _require_chunks(weight, name)
    if positions is None and cos_sin_cache is None:
        return None if weight is None else Prologue(weight, None, None, eps)
    for name, value in (("positions", positions), ("cos_sin_cache", cos_sin_cache)):
        require(value is not None, name, "a torch.Tensor for rope", None)
    count, name = (len(elements.scaled),), "cos_sin_cache"
    positions = require_ints(positions, "positions", device, (count,), tokens, _SLOT_DTYPES)
    table = require_tensor(cos_sin_cache, name).detach()
    require_dims(table, name, (2,))
    shape = (max(1, len(table)), WriteRowsSpec.rope_elements)
    require_floats(table, name, device, (shape,), "max_position, cosines and sines")
    _require_chunks(table, name)
    return Prologue(weight, positions, table, eps)


def _require_chunks(tensor: torch.Tensor, argument: str) -> None:
    require_contiguous(tensor, argument)
    require_aligned_pointer(tensor, argument)


def _append_rows(
    elements: Elements,
    slot_mapping: object,
    pool: Pool,
    row: RowFormat,
    scales: torch.Tensor | None = None,
    prologue: Prologue | None = None,
) -> None:
    """Write rows into the slots of a pool."""
    name, device = "slot_mapping", elements.scaled.device
    slot_mapping = require_tensor(slot_mapping, name)
    require_device(slot_mapping, name, device)
    require_dtype(slot_mapping, name, _SLOT_DTYPES)
    require_dims(slot_mapping, name, (1,))
    require_contiguous(slot_mapping, name)
    count, tokens = len(slot_mapping), len(elements.scaled)
    require(count <= tokens, f"{name}.shape", f"[n], n <= {tokens} (tokens)", [count])
    require_writable(pool.cache, "cache")
    if not count or not pool.cache.numel():
        return
    write(elements, slot_mapping, pool, row, scales, prologue)


def _checked_tokens(
    value: object, argument: str, widths: tuple[int, ...], dims: int = 2
) -> torch.Tensor:
    """Return tokens of ``dims`` dimensions, without the axis of size 1 that they may have."""
    tokens = require_tensor(value, argument)
    require_dims(tokens, argument, (dims, dims + 1))
    require_dtype(tokens, argument, tuple(DTYPES))
    if tokens.dim() > dims:
        axis = next((axis for axis in range(1, dims) if tokens.shape[axis] == 1), None)
        if axis is None:
            reject(f"{argument}.shape", "an axis of size 1 for the KV head", list(tokens.shape))
        tokens = tokens.squeeze(axis)
    rule = " or ".join(map(str, widths))
    require(tokens.shape[-1] in widths, f"{argument}.shape[-1]", rule, tokens.shape[-1])
    return tokens.detach()
