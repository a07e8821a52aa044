"""The tensor maps of a paged cache of keys and values: what copies are told of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mlagen.runtime.tensor_map import TiledTensor, encode
from mlagen.spec.gqa_sm90 import GqaSm90Spec

# Caches whose maps are remembered for each layout; a model has one for each of its layers.
_MAX_CACHES = 4096


@dataclass(frozen=True, kw_only=True)
class GqaTensorMapLayout:
    """All of a cache but where keys and values begin.

    Strides are bytes from page to page, token to token and head to head.
    """

    spec: GqaSm90Spec
    num_pages: int
    kv_heads: int
    key_strides: tuple[int, int, int]
    value_strides: tuple[int, int, int]


class GqaCacheMaps(dict[tuple[int, int], bytes]):
    """The maps of the caches of one form, of keys and then of values, by where they begin."""

    def __init__(self, signature: GqaTensorMapLayout) -> None:
        super().__init__()
        self._signature = signature

    def __missing__(self, beginnings: tuple[int, int]) -> bytes:
        key, value = beginnings
        maps = self._encoded(key, self._signature.key_strides)
        maps += self._encoded(value, self._signature.value_strides)
        if len(self) >= _MAX_CACHES:
            self.clear()
        self[beginnings] = maps
        return maps

    def _encoded(self, address: int, strides: tuple[int, int, int]) -> bytes:
        """Return the map of keys or values as lines: element, token, column, head, page."""
        signature, spec = self._signature, self._signature.spec
        columns = spec.row_bytes // spec.line_bytes
        elements = spec.variant.head_dim // columns
        page_size = spec.variant.page_size
        page_stride, token_stride, head_stride = strides
        tensor = TiledTensor(
            dtype=spec.variant.kv_dtype,
            sizes=(elements, page_size, columns, signature.kv_heads, signature.num_pages),
            strides=(
                token_stride,
                spec.line_bytes,
                # Of a single one the stride may be anything, and does not count.
                head_stride if signature.kv_heads > 1 else spec.row_bytes,
                page_stride if signature.num_pages > 1 else spec.row_bytes,
            ),
            box=(elements, spec.box_tokens, columns, spec.heads_per_cta, 1),
        )
        return encode(tensor, address)


@lru_cache(maxsize=256)
def maps_of(signature: GqaTensorMapLayout) -> GqaCacheMaps:
    """Return the maps of all caches of a form, which calls of any batch share."""
    return GqaCacheMaps(signature)
