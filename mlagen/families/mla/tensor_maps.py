"""TMA tensor maps of a paged MLA cache for the sm90 kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
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


def encoded_maps(layout: TensorMapLayout, cache: int, rope: int) -> Maps:
    """Return the maps of a cache by the base addresses of its latent and its rope part."""
    spec, rope_dim = layout.spec, layout.spec.variant.qk_rope_head_dim
    latent_tiles = spec.variant.kv_dtype.row_bytes(spec.variant.kv_lora_rank) // _TILE_BYTES
    strides = layout.token_stride, layout.page_stride
    rope_strides = layout.rope_token_stride, layout.rope_page_stride
    is_joined = rope == cache + latent_tiles * _TILE_BYTES and rope_strides == strides
    separate_rope = rope_dim > 0 and not is_joined
    latent_map = _encoded(layout, cache, strides, tiles=latent_tiles, tiles_per_box=1)
    rope_map = latent_map  # a kernel without rope does not read it
    if rope_dim:
        rope_map = _encoded(layout, rope, rope_strides, tiles=1, tiles_per_box=1, width=rope_dim)
    if not spec.copies_tile_groups:  # mla_sm90_fp8 copies the latent part of whole rows
        kv_map = _encoded(layout, cache, strides, tiles=latent_tiles, tiles_per_box=latent_tiles)
    elif separate_rope:  # the kernel does not read it
        kv_map = latent_map
    else:
        tiles, per_box = latent_tiles + (rope_dim > 0), spec.tiles_per_stage
        kv_map = _encoded(layout, cache, strides, tiles=tiles, tiles_per_box=per_box)
    return Maps(latent_map + rope_map + kv_map, separate_rope)


def _encoded(
    layout: TensorMapLayout,
    address: int,
    strides: tuple[int, int],
    *,
    tiles: int,
    tiles_per_box: int,
    width: int | None = None,
) -> bytes:
    """Return the map of a part, with dimensions element (``width``), token, tile, page."""
    spec = layout.spec
    token_stride, page_stride = strides
    width = width or _TILE_BYTES // spec.variant.kv_dtype.row_bytes(1)
    tensor = TiledTensor(
        dtype=spec.variant.kv_dtype,
        sizes=(width, spec.variant.page_size, tiles, layout.num_pages),
        strides=(token_stride, _TILE_BYTES, page_stride),
        box=(width, spec.box_tokens, tiles_per_box, 1),
    )
    return encode(tensor, address)


@lru_cache(maxsize=256)
def maps_of(layout: TensorMapLayout) -> CacheMaps:
    """Return the maps of all caches of a layout, shared by calls of any batch."""
    return lru_cache(maxsize=_MAX_CACHES)(partial(encoded_maps, layout))
