"""Pools of tokens: caches whose pages hold rows of one format, and where their entries are."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlagen.families.common.arguments import (
    ALIGNMENT_BYTES,
    reject,
    require,
    require_aligned_pointer,
    require_dense_last_dim,
    require_device,
    require_dims,
    require_dtype,
    require_tensor,
)
from mlagen.spec.rows import RowFormat
from mlagen.values import INT32_MAX

_AXES = {"HND": (1, "[pages, 1, page_size, {}]"), "NHD": (2, "[pages, page_size, 1, {}]")}
_WIDTHS = "bytes of a row; other widths are other formats"


class Pool(NamedTuple):
    """Pages of rows of a format. Entry ``g`` is slot ``g % rows_per_page`` of its page."""

    cache: torch.Tensor  # uint8[pages, page_size, row bytes]
    page_stride: int  # bytes
    token_stride: int  # bytes between the data rows of a page
    rows_per_page: int  # page_size, or more if entries count the padding of pages, too


def check_pool(
    value: object,
    argument: str,
    row: RowFormat,
    elements: int,
    device: torch.device,
    *,
    kv_layout: str | None = None,
    counts_padding: bool = False,
    dtypes: tuple[torch.dtype, ...] = (torch.uint8,),
) -> Pool:
    """Return a cache of rows of a format as a pool.

    With ``kv_layout`` an axis of size 1 has its place there; ``counts_padding`` says that entries
    count the rows that fit into the padding of a page, too. Raises ArgumentError if shape, strides
    or address break a rule.
    """
    cache = require_tensor(value, argument)
    require_device(cache, argument, device)
    require_dtype(cache, argument, dtypes)
    require_dims(cache, argument, (3, 4))
    cache = _three_dims(cache, argument, kv_layout)
    pages, page_size, width = cache.shape
    size = row.row_bytes(elements)
    if width != size if row.is_named else not row.fits(width, elements):
        reject(f"{argument}.shape[-1]", f"{size} ({_WIDTHS})", width)
    require(page_size >= 1, f"{argument}.shape", "pages of 1 token or more", list(cache.shape))
    rows = pages * page_size
    require(rows <= INT32_MAX, f"{argument}.shape", f"{INT32_MAX} rows or fewer", rows)
    require_dense_last_dim(cache, argument)
    page_stride, pitch = _strides(cache, argument, row, size, counts_padding=counts_padding)
    if cache.numel():
        require_aligned_pointer(cache, argument)
    rows_per_page = page_stride // pitch if counts_padding and pages > 1 else page_size
    token_stride = row.data_bytes(elements) if row.has_scale_rows else pitch
    return Pool(cache.view(torch.uint8), page_stride, token_stride, rows_per_page)


def _three_dims(cache: torch.Tensor, argument: str, kv_layout: str | None) -> torch.Tensor:
    if cache.dim() == 3:
        return cache
    axes = [_AXES[kv_layout]] if kv_layout else list(_AXES.values())
    axis = next((axis for axis, _ in axes if cache.shape[axis] == 1), None)
    if axis is None:
        rule = " or ".join(form.format(cache.shape[-1]) for _, form in axes)
        reject(f"{argument}.shape", rule, list(cache.shape))
    return cache.squeeze(axis)


def _strides(
    cache: torch.Tensor, argument: str, row: RowFormat, size: int, *, counts_padding: bool
) -> tuple[int, int]:
    """Return the bytes between pages, and between the rows of a page; axes of size 1 have none."""
    pages, page_size, width = cache.shape
    page_stride, pitch = cache.stride(0), cache.stride(1)
    if page_size == 1:
        pitch = page_stride if counts_padding and pages > 1 else width
    if row.has_scale_rows:
        require(pitch == size, f"stride of a token of {argument}", f"{size} (the row)", pitch)
    else:
        is_valid = pitch >= size and pitch % ALIGNMENT_BYTES == 0
        rule = f"a multiple of {ALIGNMENT_BYTES}, {size} (the row) or more"
        require(is_valid, f"stride of a token of {argument}", rule, pitch)
    extent = (page_size - 1) * pitch + size
    if pages <= 1:
        return extent, pitch
    is_valid = page_stride >= extent and page_stride % ALIGNMENT_BYTES == 0
    rule = f"a multiple of {ALIGNMENT_BYTES}, {extent} (the page) or more"
    require(is_valid, f"{argument}.stride(0)", rule, page_stride)
    if counts_padding:
        rule = f"a multiple of {pitch} (stride of a token)"
        require(page_stride % pitch == 0, f"{argument}.stride(0)", rule, page_stride)
    return page_stride, pitch
