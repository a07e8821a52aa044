"""TMA tensor maps of an MLA cache: their layouts, and how often they are encoded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlagen.families.mla import tensor_maps as mla_maps
from mlagen.families.mla.tensor_maps import CacheMaps, TensorMapLayout, maps_of
from mlagen.runtime.tensor_map import TiledTensor
from mlagen.spec.dtype import DType
from mlagen.spec.mla.sm90 import MlaSm90Spec
from tests.families.launches import map_of
from tests.fixture_types import Patch
from tests.kernels import mla_sm90

CACHE = 0x70000000
LATENT_END = CACHE + 1024

Encoded = list[tuple[TiledTensor, int]]


def layout(spec: MlaSm90Spec) -> TensorMapLayout:
    """Return the layout of a cache of 100 pages in one tensor, with 1152 bytes per token."""
    return TensorMapLayout(
        spec=spec,
        num_pages=100,
        page_stride=80_000,
        token_stride=1152,
        rope_page_stride=80_000,
        rope_token_stride=1152,
    )


def tiles(spec: MlaSm90Spec, count: int, *, per_box: int) -> TiledTensor:
    """Return ``count`` tiles of that cache, with 64 elements of each token."""
    return TiledTensor(
        dtype=DType.BF16,
        sizes=(64, spec.variant.page_size, count, 100),
        strides=(1152, 128, 80_000),
        box=(64, min(spec.variant.page_size, 64), per_box, 1),
    )


@pytest.fixture
def encoded(monkeypatch: Patch) -> Encoded:
    """Record the encoded maps."""
    seen: Encoded = []

    def encode(tensor: TiledTensor, address: int) -> bytes:
        seen.append((tensor, address))
        return map_of(tensor, address)

    monkeypatch.setattr(mla_maps, "encode", encode)
    return seen


@pytest.mark.parametrize("page_size", [64, 16])
@pytest.mark.parametrize(
    ("rows", "group"), [(64, (8, 8)), (32, (9, 3)), (16, (9, 3))], ids=["64", "32", "16"]
)
def test_a_cache_in_one_tensor_has_three_maps(
    rows: int, group: tuple[int, int], page_size: int, encoded: Encoded
) -> None:
    """The maps are of the latent tiles, the rope tile, and the tiles of one copy."""
    spec = mla_sm90(rows=rows, page_size=page_size)

    maps = CacheMaps(layout(spec))[CACHE, LATENT_END]

    expected = [
        (tiles(spec, 8, per_box=1), CACHE),
        (tiles(spec, 1, per_box=1), LATENT_END),
        (tiles(spec, group[0], per_box=group[1]), CACHE),
    ]
    assert encoded == expected
    assert maps.packed == b"".join(map_of(*each) for each in expected)
    assert not maps.separate_rope


SEPARATE_ROPE = {
    "elsewhere": (LATENT_END + 16, {}),
    "in rows of another length": (LATENT_END, {"rope_token_stride": 128}),
    "in pages of another length": (LATENT_END, {"rope_page_stride": 8192}),
}


@pytest.mark.parametrize(("rope", "strides"), SEPARATE_ROPE.values(), ids=SEPARATE_ROPE)
def test_a_rope_part_elsewhere_is_separate(
    rope: int, strides: dict[str, Any], encoded: Encoded
) -> None:
    """A separate rope part has its own strides, and there is no map of both parts."""
    spec = mla_sm90(rows=16)
    cache = replace(layout(spec), **strides)

    maps = CacheMaps(cache)[CACHE, rope]

    latent, rope_tile = encoded
    assert maps.separate_rope
    assert latent == (tiles(spec, 8, per_box=1), CACHE)
    own = (cache.rope_token_stride, 128, cache.rope_page_stride)
    assert rope_tile == (replace(tiles(spec, 1, per_box=1), strides=own), rope)
    assert maps.packed == map_of(*latent) + map_of(*rope_tile) + map_of(*latent)


def test_the_group_map_without_swap_ab_has_the_latent_part(encoded: Encoded) -> None:
    """It does not depend on the rope part."""
    spec = mla_sm90(rows=64)

    maps = CacheMaps(layout(spec))[CACHE, LATENT_END + 4096]

    assert maps.separate_rope
    assert encoded[2] == (tiles(spec, 8, per_box=8), CACHE)


@pytest.mark.parametrize(("rows", "group"), [(64, 8), (32, 4), (16, 4)])
def test_a_cache_without_rope_has_maps_of_its_latent_part(
    rows: int, group: int, encoded: Encoded
) -> None:
    """Whatever its rope strides are, nothing is separate, and no map reads past the latent part."""
    cache = replace(layout(mla_sm90(rows=rows, qk_rope_head_dim=0)), rope_token_stride=2)

    maps = CacheMaps(cache)[CACHE, LATENT_END + 16]

    latent, copied = encoded
    assert not maps.separate_rope
    assert latent == (tiles(cache.spec, 8, per_box=1), CACHE)
    assert copied == (tiles(cache.spec, 8, per_box=group), CACHE)
    assert maps.packed == map_of(*latent) + map_of(*latent) + map_of(*copied)


def test_maps_are_cached_by_both_addresses_up_to_a_capacity(encoded: Encoded) -> None:
    """The same addresses encode nothing, others encode theirs, and dropped maps are made again."""
    maps = CacheMaps(layout(mla_sm90()))
    first = maps[CACHE, LATENT_END]

    assert maps[CACHE, LATENT_END] is first
    assert len(encoded) == 3
    for other in ((CACHE + 16, LATENT_END + 16), (CACHE, LATENT_END + 16)):
        assert maps[other].packed != first.packed
    for index in range(mla_maps._MAX_CACHES + 1):
        _ = maps[CACHE + index * 16, LATENT_END + index * 16]
    assert len(maps) <= mla_maps._MAX_CACHES
    assert maps[CACHE, LATENT_END].packed == first.packed


def test_calls_of_one_layout_share_their_maps() -> None:
    """Equal layouts have the same maps, and another number of pages has others."""
    one = maps_of(layout(mla_sm90()))

    assert maps_of(layout(mla_sm90())) is one
    assert maps_of(replace(layout(mla_sm90()), num_pages=101)) is not one
