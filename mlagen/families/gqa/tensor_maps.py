"""TMA tensor maps of a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from mlagen.families.common.arguments import ALIGNMENT_BYTES
from mlagen.runtime.tensor_map import TiledTensor, encode
from mlagen.spec.dtype import TOKEN_SCALE_BYTES
from mlagen.spec.gqa.sm90 import GqaSm90Spec

# Cached maps for each layout; a model has one cache for each layer.
_MAX_CACHES = 4096


GqaCacheMaps = Callable[[int, int], bytes]  # by the base addresses of keys and values


@dataclass(frozen=True, kw_only=True)
class GqaTensorMapLayout:
    """Everything that the maps depend on except the base addresses.

    Strides are in bytes, between pages, tokens and heads.
    """

    spec: GqaSm90Spec
    num_pages: int
    kv_heads: int
    key_strides: tuple[int, int, int]
    value_strides: tuple[int, int, int]


@lru_cache(maxsize=256)
def maps_of(layout: GqaTensorMapLayout) -> GqaCacheMaps:
    """Return the maps of all caches of a layout, shared by calls of any batch."""
    spec = layout.spec
    if spec.has_unaligned_rows:
        return lru_cache(maxsize=_MAX_CACHES)(partial(_unaligned_maps, layout))
    keys = _tensor_of(layout, spec.key_row_bytes, layout.key_strides)
    values = _tensor_of(layout, spec.value_row_bytes, layout.value_strides)
    return lru_cache(maxsize=_MAX_CACHES)(
        lambda key, value: encode(keys, key) + encode(values, value)
    )


def _tensor_of(
    layout: GqaTensorMapLayout, row_bytes: int, strides: tuple[int, int, int]
) -> TiledTensor:
    """Return keys or values with dimensions element, token, column, head, page."""
    spec = layout.spec
    columns = row_bytes // spec.line_bytes
    elements = spec.line_bytes // spec.variant.kv_dtype.unit_bytes
    page_size = spec.variant.page_size
    page_stride, token_stride, head_stride = strides
    return TiledTensor(
        dtype=spec.variant.kv_dtype,
        sizes=(elements, page_size, columns, layout.kv_heads, layout.num_pages),
        strides=(
            token_stride,
            spec.line_bytes,
            # The stride of an axis of size 1 is arbitrary and unused.
            head_stride if layout.kv_heads > 1 else row_bytes,
            page_stride if layout.num_pages > 1 else row_bytes,
        ),
        box=(elements, spec.box_tokens, columns, spec.kv_heads_per_cta, 1),
    )


def _unaligned_maps(layout: GqaTensorMapLayout, key: int, value: int) -> bytes:
    spec = layout.spec
    return b"".join(
        encode(
            _unaligned_rows(layout, row_bytes, strides, address % ALIGNMENT_BYTES),
            address - address % ALIGNMENT_BYTES,
        )
        for address, row_bytes, strides in (
            (key, spec.key_row_bytes, layout.key_strides),
            (value, spec.value_row_bytes, layout.value_strides),
        )
    )


def _unaligned_rows(
    layout: GqaTensorMapLayout, row_bytes: int, strides: tuple[int, int, int], shift: int
) -> TiledTensor:
    """Return keys or values, with scales, with dimensions word, pair of tokens, head, page.

    Words reach from an aligned place before the first row to the last row of a pair of tokens; they
    include those of other heads, if the stride of heads is not aligned.
    """
    spec = layout.spec
    page_stride, token_stride, head_stride = strides
    is_axis = head_stride % ALIGNMENT_BYTES == 0
    words = shift + token_stride + row_bytes + TOKEN_SCALE_BYTES
    words += 0 if is_axis else head_stride * (layout.kv_heads - 1)
    return TiledTensor(
        dtype=spec.variant.kv_dtype,
        sizes=(
            words // TOKEN_SCALE_BYTES,
            spec.variant.page_size // 2,
            layout.kv_heads if is_axis else 1,
            layout.num_pages,
        ),
        strides=(
            2 * token_stride,
            head_stride if is_axis and layout.kv_heads > 1 else ALIGNMENT_BYTES,
            page_stride if layout.num_pages > 1 else ALIGNMENT_BYTES,
        ),
        box=((row_bytes + spec.row_padding) // TOKEN_SCALE_BYTES, spec.box_tokens // 2, 1, 1),
        has_words=True,
    )
