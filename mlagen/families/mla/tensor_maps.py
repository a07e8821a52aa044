"""TMA tensor maps of a paged MLA cache for the sm90 kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mlagen.runtime.tensor_map import TiledTensor, encode
from mlagen.spec.mla.sm90 import MlaSm90Spec

# Cached maps for each layout; a model has one cache for each layer.
_MAX_CACHES = 4096

_TILE_BYTES = 128  # of a row in shared memory; an e4m3 rope part has half of that


class Maps(NamedTuple):
    """The maps of one cache, as kernel parameters."""

    packed: bytes  # latent_map, rope_map and kv_map
    separate_rope: bool


CacheMaps = Callable[[int, int], Maps]  # by the base addresses of latent and rope part


@dataclass(frozen=True, kw_only=True)
class TensorMapLayout:
    """Everything that the maps depend on except the base addresses; strides are in bytes."""

    spec: MlaSm90Spec
    num_pages: int
    page_stride: int
    token_stride: int
    rope_page_stride: int
    rope_token_stride: int


@lru_cache(maxsize=256)
def maps_of(layout: TensorMapLayout) -> CacheMaps:
    """Return the maps of all caches of a layout, shared by calls of any batch."""
    spec, rope_dim = layout.spec, layout.spec.variant.qk_rope_head_dim
    latent_tiles = spec.variant.kv_dtype.row_bytes(spec.variant.kv_lora_rank) // _TILE_BYTES
    strides = layout.token_stride, layout.page_stride
    rope_strides = layout.rope_token_stride, layout.rope_page_stride
    latent = _tensor_of(layout, strides, tiles=latent_tiles)
    rope_tile = _tensor_of(layout, rope_strides, tiles=1, width=rope_dim)
    tiles, per_box = latent_tiles, latent_tiles  # mla_sm90_fp8 copies the latent part of whole rows
    if spec.copies_tile_groups:
        tiles, per_box = latent_tiles + (rope_dim > 0), spec.tiles_per_stage
    copied = _tensor_of(layout, strides, tiles=tiles, tiles_per_box=per_box)

    def encoded(cache: int, rope: int) -> Maps:
        is_joined = rope == cache + latent_tiles * _TILE_BYTES and rope_strides == strides
        separate_rope = rope_dim > 0 and not is_joined
        latent_map = encode(latent, cache)
        # A kernel without rope reads no map of it, and one with separate rope none of joined tiles.
        rope_map = encode(rope_tile, rope) if rope_dim else latent_map
        is_read = not (spec.copies_tile_groups and separate_rope)
        kv_map = encode(copied, cache) if is_read else latent_map
        return Maps(latent_map + rope_map + kv_map, separate_rope)

    return lru_cache(maxsize=_MAX_CACHES)(encoded)


def _tensor_of(
    layout: TensorMapLayout,
    strides: tuple[int, int],
    *,
    tiles: int,
    tiles_per_box: int = 1,
    width: int = 0,
) -> TiledTensor:
    """Return a part with dimensions element (``width``, or those of a tile), token, tile, page."""
    spec = layout.spec
    token_stride, page_stride = strides
    width = width or _TILE_BYTES // spec.variant.kv_dtype.row_bytes(1)
    return TiledTensor(
        dtype=spec.variant.kv_dtype,
        sizes=(width, spec.variant.page_size, tiles, layout.num_pages),
        strides=(token_stride, _TILE_BYTES, page_stride),
        box=(width, spec.box_tokens, tiles_per_box, 1),
    )
