"""The tensor maps of a cache: what the driver is asked for, and how often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlagen.api import mla_maps
from mlagen.api.mla_maps import CacheMaps, TensorMapLayout, maps_of
from mlagen.runtime.tensor_map import TiledTensor
from mlagen.spec.dtype import DType
from mlagen.spec.mla_sm90 import MlaSm90Spec
from tests.api.launches import map_of
from tests.kernels import mla_sm90

CACHE = 0x70000000
BEHIND = CACHE + 1024

Asked = list[tuple[TiledTensor, int]]


def signature(spec: MlaSm90Spec) -> TensorMapLayout:
    """Return a cache of 100 pages in one tensor, of tokens 1152 bytes apart."""
    return TensorMapLayout(
        spec=spec,
        num_pages=100,
        page_stride=80_000,
        token_stride=1152,
        rope_page_stride=80_000,
        rope_token_stride=1152,
    )


def tiles(spec: MlaSm90Spec, count: int, *, of_a_box: int) -> TiledTensor:
    """Return so many tiles of that cache, of 64 elements a token each."""
    return TiledTensor(
        dtype=DType.BF16,
        sizes=(64, spec.variant.page_size, count, 100),
        strides=(1152, 128, 80_000),
        box=(64, min(spec.variant.page_size, 64), of_a_box, 1),
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Note what is encoded."""
    seen: Asked = []

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
    rows: int, group: tuple[int, int], page_size: int, asked: Asked
) -> None:
    """Tiles of the latent part, the rope tile, and what is copied or fetched together."""
    spec = mla_sm90(rows=rows, page_size=page_size)

    maps = CacheMaps(signature(spec))[CACHE, BEHIND]

    expected = [
        (tiles(spec, 8, of_a_box=1), CACHE),
        (tiles(spec, 1, of_a_box=1), BEHIND),
        (tiles(spec, group[0], of_a_box=group[1]), CACHE),
    ]
    assert asked == expected
    assert maps.packed == b"".join(map_of(*each) for each in expected)
    assert not maps.separate_rope


def test_a_page_of_48_tokens_is_copied_in_boxes_that_blocks_of_64_share(asked: Asked) -> None:
    """The box is the greatest that divides both."""
    CacheMaps(signature(mla_sm90(page_size=48)))[CACHE, BEHIND]

    assert {tensor.box[1] for tensor, _ in asked} == {16}
    assert {tensor.sizes[1] for tensor, _ in asked} == {48}


APART = {
    "elsewhere": (BEHIND + 16, {}),
    "in rows of another length": (BEHIND, {"rope_token_stride": 128}),
    "in pages of another length": (BEHIND, {"rope_page_stride": 8192}),
}


@pytest.mark.parametrize(("rope", "strides"), APART.values(), ids=APART)
def test_a_rope_part_that_is_not_behind_the_latent_part_is_apart(
    rope: int, strides: dict[str, Any], asked: Asked
) -> None:
    """Its map has its own strides, and the one of both together is not made."""
    spec = mla_sm90(rows=16)
    cache = replace(signature(spec), **strides)

    maps = CacheMaps(cache)[CACHE, rope]

    latent, rope_tile = asked
    assert maps.separate_rope
    assert latent == (tiles(spec, 8, of_a_box=1), CACHE)
    own = (cache.rope_token_stride, 128, cache.rope_page_stride)
    assert rope_tile == (replace(tiles(spec, 1, of_a_box=1), strides=own), rope)
    assert maps.packed == map_of(*latent) + map_of(*rope_tile) + map_of(*latent)


def test_the_wide_kernel_fetches_the_latent_part_ahead_wherever_rope_is(asked: Asked) -> None:
    """Its third map has nothing to do with the rope part."""
    spec = mla_sm90(rows=64)

    maps = CacheMaps(signature(spec))[CACHE, BEHIND + 4096]

    assert maps.separate_rope
    assert asked[2] == (tiles(spec, 8, of_a_box=8), CACHE)


def test_a_cache_that_was_seen_is_not_encoded_again(asked: Asked) -> None:
    """A usual call makes no map."""
    maps = CacheMaps(signature(mla_sm90()))
    first = maps[CACHE, BEHIND]

    again = maps[CACHE, BEHIND]

    assert again is first
    assert len(asked) == 3


@pytest.mark.parametrize("other", [(CACHE + 16, BEHIND + 16), (CACHE, BEHIND + 16)])
def test_another_cache_has_other_maps(other: tuple[int, int], asked: Asked) -> None:
    """Both beginnings count."""
    maps = CacheMaps(signature(mla_sm90()))
    first = maps[CACHE, BEHIND]

    second = maps[other]

    assert first.packed != second.packed
    assert len(asked) > 3


@pytest.mark.usefixtures("asked")
def test_only_so_many_are_remembered() -> None:
    """Where they are forgotten they are made again."""
    maps = CacheMaps(signature(mla_sm90()))
    for index in range(mla_maps._MAX_CACHES + 1):
        _ = maps[CACHE + index * 16, BEHIND + index * 16]

    assert len(maps) <= mla_maps._MAX_CACHES
    assert maps[CACHE, BEHIND].packed == CacheMaps(signature(mla_sm90()))[CACHE, BEHIND].packed


def test_calls_of_one_form_share_their_maps() -> None:
    """Whatever the batch is; another number of pages is another form."""
    one = maps_of(signature(mla_sm90()))

    assert maps_of(signature(mla_sm90())) is one
    assert maps_of(replace(signature(mla_sm90()), num_pages=101)) is not one
