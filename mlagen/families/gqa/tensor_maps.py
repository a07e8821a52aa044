"""TMA tensor maps of a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import ALIGNMENT_BYTES
from mlagen.runtime.tensor_map import TiledTensor, encode
from mlagen.spec.gqa.sm90 import GqaSm90Spec
from mlagen.values import INT32_MAX

# Cached maps for each layout; a model has one cache for each layer.
_MAX_CACHES = 4096

_FAR_HEADS = "expected the KV heads of a token with scales within 2 GiB"


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
    make = _token_pairs_of if spec.variant.has_token_scales else _tensor_of
    keys = make(layout, spec.key_row_bytes, layout.key_strides)
    values = make(layout, spec.value_row_bytes, layout.value_strides)

    def encode_at(key: int, value: int) -> bytes:
        # The boxes of rows with token scales begin at the bytes behind.
        aligned = (address - address % ALIGNMENT_BYTES for address in (key, value))
        return b"".join(map(encode, (keys, values), aligned))

    return lru_cache(maxsize=_MAX_CACHES)(encode_at)


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


def _token_pairs_of(
    layout: GqaTensorMapLayout, row_bytes: int, strides: tuple[int, int, int]
) -> TiledTensor:
    """Return keys or values of any 4 bytes with dimensions byte, pair of tokens, column, page.

    The bytes are those of all KV heads and of both tokens of a pair; a box has one of them.
    """
    spec = layout.spec
    columns, step = row_bytes // spec.line_bytes, spec.token_step
    page_size = spec.variant.page_size
    page_stride, token_stride, head_stride = strides
    size = (layout.kv_heads - 1) * head_stride + token_stride + ALIGNMENT_BYTES + spec.line_bytes
    if size > INT32_MAX:
        raise UnsupportedError(f"MLAGEN_GQA_KERNEL=sm90: {_FAR_HEADS}, got {size} bytes")
    return TiledTensor(
        dtype=spec.variant.kv_dtype,
        sizes=(size, page_size // step, columns, layout.num_pages),
        strides=(
            token_stride * step,
            spec.line_bytes,
            page_stride if layout.num_pages > 1 else row_bytes,
        ),
        box=(spec.line_bytes, spec.box_tokens // step, columns, 1),
    )
