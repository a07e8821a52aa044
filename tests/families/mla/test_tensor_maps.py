"""TMA tensor maps of an MLA cache: their layouts, and how often they are encoded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlagen.families.mla import tensor_maps as mla_maps
from mlagen.families.mla.tensor_maps import TensorMapLayout, maps_of
from mlagen.runtime.tensor_map import TiledTensor
from mlagen.spec.dtype import DType
from mlagen.spec.mla.sm90 import MlaSm90Spec
from tests.families.launches import map_of
from tests.fixture_types import Patch
from tests.kernels import mla_sm90

CACHE = 0x70000000
LATENT_END = CACHE + 1024

Encoded = list[tuple[TiledTensor, int]]  # with addresses


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


def in_one_tensor(rows: int, page_size: int, copied: int, per_box: int) -> tuple[Any, int, Encoded]:
    """Return a cache with maps of the latent tiles, the rope tile, and the tiles of one copy."""
    spec = mla_sm90(rows=rows, page_size=page_size)
    latent, rope = (tiles(spec, 8, per_box=1), CACHE), (tiles(spec, 1, per_box=1), LATENT_END)
    return layout(spec), LATENT_END, [latent, rope, (tiles(spec, copied, per_box=per_box), CACHE)]


def with_separate_rope(rows: int, rope: int, **strides: Any) -> tuple[Any, int, Encoded]:
    """Return one whose rope part has its own strides; with swap-AB no map has both parts."""
    spec = mla_sm90(rows=rows)
    cache, latent = replace(layout(spec), **strides), (tiles(spec, 8, per_box=1), CACHE)
    own = (cache.rope_token_stride, 128, cache.rope_page_stride)
    copied = (tiles(spec, 8, per_box=8), CACHE) if rows == 64 else latent
    return cache, rope, [latent, (replace(tiles(spec, 1, per_box=1), strides=own), rope), copied]


def without_rope(rows: int, per_box: int) -> tuple[Any, int, Encoded]:
    """Return one whose maps never read past the latent part, whatever its rope strides are."""
    spec = mla_sm90(rows=rows, qk_rope_head_dim=0)
    latent, copied = ((tiles(spec, 8, per_box=size), CACHE) for size in (1, per_box))
    return replace(layout(spec), rope_token_stride=2), LATENT_END + 16, [latent, latent, copied]


CACHES: dict[str, tuple[Any, int, Encoded]] = {
    **{f"64 rows, pages of {size}": in_one_tensor(64, size, 8, 8) for size in (64, 16)},
    **{f"32 rows, pages of {size}": in_one_tensor(32, size, 9, 3) for size in (64, 16)},
    **{f"16 rows, pages of {size}": in_one_tensor(16, size, 9, 3) for size in (64, 16)},
    "rope elsewhere": with_separate_rope(16, LATENT_END + 16),
    "rope in rows of another length": with_separate_rope(16, LATENT_END, rope_token_stride=128),
    "rope in pages of another length": with_separate_rope(16, LATENT_END, rope_page_stride=8192),
    "64 rows, rope elsewhere": with_separate_rope(64, LATENT_END + 4096),
    **{
        f"{rows} rows without rope": without_rope(rows, box)
        for rows, box in ((64, 8), (32, 4), (16, 4))
    },
}


@pytest.mark.parametrize("name", CACHES)
def test_maps_of_a_cache(name: str, encoded: Encoded) -> None:
    """Maps of latent part, rope part and one copy are packed, and equal ones are encoded once."""
    cache, rope, expected = CACHES[name]

    maps = maps_of.__wrapped__(cache)(CACHE, rope)

    assert encoded == list(dict.fromkeys(expected))
    assert maps.packed == b"".join(map_of(*each) for each in expected)
    assert bool(maps.separate_rope) is ("rope elsewhere" in name or name.startswith("rope in"))


def test_maps_are_cached_by_both_addresses(encoded: Encoded) -> None:
    """The same addresses encode nothing, and others encode theirs."""
    maps = maps_of.__wrapped__(layout(mla_sm90()))
    first = maps(CACHE, LATENT_END)

    assert maps(CACHE, LATENT_END) is first
    assert len(encoded) == 3
    for other in ((CACHE + 16, LATENT_END + 16), (CACHE, LATENT_END + 16)):
        assert maps(*other).packed != first.packed


def test_calls_of_one_layout_share_their_maps() -> None:
    """Equal layouts have the same maps, and another number of pages has others."""
    one = maps_of(layout(mla_sm90()))

    assert maps_of(layout(mla_sm90())) is one
    assert maps_of(replace(layout(mla_sm90()), num_pages=101)) is not one
