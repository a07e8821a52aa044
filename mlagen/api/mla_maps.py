"""The tensor maps of a paged MLA cache: what the sm90 kernel's copies are told of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mlagen.runtime.tensor_map import TiledTensor, encode
from mlagen.spec.mla_sm90 import MlaSm90Spec

# Caches whose maps are remembered for each layout; a model has one for each of its layers.
_MAX_CACHES = 4096

_TILE_BYTES = 128  # of a row in shared memory; a rope part in e4m3 is half of that
_TILES_OF_A_COPY = 3  # of the narrow kernel


class Maps(NamedTuple):
    """The maps of one cache, as the kernel takes them."""

    packed: bytes  # latent_map, rope_map and group_map
    separate_rope: bool


@dataclass(frozen=True, kw_only=True)
class TensorMapLayout:
    """All of a cache but where its parts begin; strides are bytes."""

    spec: MlaSm90Spec
    num_pages: int
    page_stride: int
    token_stride: int
    rope_page_stride: int
    rope_token_stride: int


class CacheMaps(dict[tuple[int, int], Maps]):
    """The maps of the caches of one form, by the addresses of their latent and rope parts."""

    def __init__(self, signature: TensorMapLayout) -> None:
        super().__init__()
        self._signature = signature

    def __missing__(self, beginnings: tuple[int, int]) -> Maps:
        maps = self._encode(*beginnings)
        if len(self) >= _MAX_CACHES:
            self.clear()
        self[beginnings] = maps
        return maps

    def _encode(self, cache: int, rope: int) -> Maps:
        signature, spec = self._signature, self._signature.spec
        latent_tiles = spec.variant.kv_dtype.row_bytes(spec.variant.kv_lora_rank) // _TILE_BYTES
        strides, rope_strides = (
            (signature.token_stride, signature.page_stride),
            (signature.rope_token_stride, signature.rope_page_stride),
        )
        separate_rope = rope != cache + latent_tiles * _TILE_BYTES or rope_strides != strides
        latent_map = self._encoded(cache, strides, tiles=latent_tiles, tiles_of_a_box=1)
        rope_map = self._encoded(
            rope, rope_strides, tiles=1, tiles_of_a_box=1, width=spec.variant.qk_rope_head_dim
        )
        if not spec.copies_tile_groups:  # the latent part of whole rows is copied, or fetched ahead
            group_map = self._encoded(
                cache, strides, tiles=latent_tiles, tiles_of_a_box=latent_tiles
            )
        elif separate_rope:  # the kernel does not use it
            group_map = latent_map
        else:
            group_map = self._encoded(
                cache, strides, tiles=latent_tiles + 1, tiles_of_a_box=_TILES_OF_A_COPY
            )
        return Maps(latent_map + rope_map + group_map, separate_rope)

    def _encoded(
        self,
        address: int,
        strides: tuple[int, int],
        *,
        tiles: int,
        tiles_of_a_box: int,
        width: int | None = None,
    ) -> bytes:
        """Return the map of a part as tiles of ``width`` elements: element, token, tile, page."""
        spec = self._signature.spec
        token_stride, page_stride = strides
        width = width or _TILE_BYTES // spec.variant.kv_dtype.row_bytes(1)
        tensor = TiledTensor(
            dtype=spec.variant.kv_dtype,
            sizes=(width, spec.variant.page_size, tiles, self._signature.num_pages),
            strides=(token_stride, _TILE_BYTES, page_stride),
            box=(width, spec.box_tokens, tiles_of_a_box, 1),
        )
        return encode(tensor, address)


@lru_cache(maxsize=256)
def maps_of(signature: TensorMapLayout) -> CacheMaps:
    """Return the maps of all caches of a form, which calls of any batch share."""
    return CacheMaps(signature)
