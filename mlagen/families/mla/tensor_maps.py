"""TMA tensor maps of a paged MLA cache for the sm90 kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mlagen.families.common.launchers import store_bounded
from mlagen.runtime.tensor_map import TiledTensor, encode
from mlagen.spec.mla.sm90 import MlaSm90Spec

# Cached maps for each layout; a model has one cache for each layer.
_MAX_CACHES = 4096

_TILE_BYTES = 128  # of a row in shared memory; an e4m3 rope part has half of that


class Maps(NamedTuple):
    """The maps of one cache, as kernel parameters."""

    packed: bytes  # latent_map, rope_map and kv_map
    separate_rope: bool


@dataclass(frozen=True, kw_only=True)
class TensorMapLayout:
    """Everything that the maps depend on except the base addresses; strides are in bytes."""

    spec: MlaSm90Spec
    num_pages: int
    page_stride: int
    token_stride: int
    rope_page_stride: int
    rope_token_stride: int


class CacheMaps(dict[tuple[int, int], Maps]):
    """The maps of caches of one layout, by the base addresses of their latent and rope parts."""

    def __init__(self, layout: TensorMapLayout) -> None:
        super().__init__()
        self._layout = layout

    def __missing__(self, base_addresses: tuple[int, int]) -> Maps:
        maps = self._encode(*base_addresses)
        store_bounded(self, base_addresses, maps, _MAX_CACHES)
        return maps

    def _encode(self, cache: int, rope: int) -> Maps:
        layout, spec = self._layout, self._layout.spec
        latent_tiles = spec.variant.kv_dtype.row_bytes(spec.variant.kv_lora_rank) // _TILE_BYTES
        strides, rope_strides = (
            (layout.token_stride, layout.page_stride),
            (layout.rope_token_stride, layout.rope_page_stride),
        )
        rope_dim = spec.variant.qk_rope_head_dim
        is_joined = rope == cache + latent_tiles * _TILE_BYTES and rope_strides == strides
        separate_rope = rope_dim > 0 and not is_joined
        latent_map = self._encode_part(cache, strides, tiles=latent_tiles, tiles_per_box=1)
        rope_map = latent_map  # a kernel without rope does not read it
        if rope_dim:
            rope_map = self._encode_part(
                rope, rope_strides, tiles=1, tiles_per_box=1, width=rope_dim
            )
        if not spec.copies_tile_groups:  # mla_sm90_fp8 copies the latent part of whole rows
            kv_map = self._encode_part(
                cache, strides, tiles=latent_tiles, tiles_per_box=latent_tiles
            )
        elif separate_rope:  # the kernel does not read it
            kv_map = latent_map
        else:
            tiles = latent_tiles + (rope_dim > 0)
            kv_map = self._encode_part(
                cache, strides, tiles=tiles, tiles_per_box=spec.tiles_per_stage
            )
        return Maps(latent_map + rope_map + kv_map, separate_rope)

    def _encode_part(
        self,
        address: int,
        strides: tuple[int, int],
        *,
        tiles: int,
        tiles_per_box: int,
        width: int | None = None,
    ) -> bytes:
        """Return the map of a part, with dimensions element (``width``), token, tile, page."""
        spec = self._layout.spec
        token_stride, page_stride = strides
        width = width or _TILE_BYTES // spec.variant.kv_dtype.row_bytes(1)
        tensor = TiledTensor(
            dtype=spec.variant.kv_dtype,
            sizes=(width, spec.variant.page_size, tiles, self._layout.num_pages),
            strides=(token_stride, _TILE_BYTES, page_stride),
            box=(width, spec.box_tokens, tiles_per_box, 1),
        )
        return encode(tensor, address)


@lru_cache(maxsize=256)
def maps_of(layout: TensorMapLayout) -> CacheMaps:
    """Return the maps of all caches of a layout, shared by calls of any batch."""
    return CacheMaps(layout)
