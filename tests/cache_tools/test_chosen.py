"""Entry selection: named and matching entries, or an error if there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cache_tools.options.chosen import chosen_entries
from cache_tools.options.entry_options import Choice
from mlagen.cache.key import CacheKey
from mlagen.cache.store import KernelStore
from mlagen.errors import ArgumentError
from tests.cache.builds import entry_folder, make_build

ARCHS = ("sm_80", "sm_90a")
FAMILIES = ("attend", "combine")
TOOLCHAINS = ("nvrtc-12.8.1", "nvrtc-13.5.37")


def key_of(family: str, arch: str, toolchain: str = TOOLCHAINS[1]) -> CacheKey:
    """Return the key of a small kernel."""
    return CacheKey((("family", family), ("spec.arch", arch)), toolchain)


def fill(root: Path, *keys: CacheKey) -> None:
    """Add kernels to a cache folder."""
    store = KernelStore(root, lock_dir=root.parent / "locks", lock_timeout_s=60)
    for key in keys:
        store.find_or_build(key, lambda: make_build(toolchain=key.toolchain))  # noqa: B023 - at once


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Return a store with two kernels for two targets by two compilers."""
    every = [key_of(*names) for names in _product()]
    fill(tmp_path / "cache", *every)
    return KernelStore(tmp_path / "cache", lock_dir=tmp_path / "locks", lock_timeout_s=60)


@pytest.fixture
def layered(tmp_path: Path) -> KernelStore:
    """Return a store with one kernel, and a layer with that kernel and another one."""
    fill(tmp_path / "cache", key_of("attend", "sm_80"))
    fill(tmp_path / "layer", key_of("attend", "sm_80"), key_of("combine", "sm_80"))
    return KernelStore(
        tmp_path / "cache",
        lock_dir=tmp_path / "locks",
        lock_timeout_s=60,
        layers=[tmp_path / "layer"],
    )


def test_all_are_selected_by_default(store: KernelStore) -> None:
    """Entries are sorted by key and compiler."""
    found = [(stored.key, stored.toolchain) for stored in chosen_entries(store, ())]

    assert found == sorted((key_of(*n).digest, n[2]) for n in _product())


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({"archs": ["sm_80"]}, 4),
        ({"archs": ["sm_80", "sm_90a"]}, 8),
        ({"families": ["attend"]}, 4),
        ({"toolchains": ["nvrtc-13.5.37"]}, 4),
        ({"toolchains": ["nvrtc-13"]}, 4),
        ({"archs": ["sm_90a"], "families": ["combine"], "toolchains": ["nvrtc-12.8.1"]}, 1),
    ],
    ids=str,
)
def test_filters_combine(filters: dict[str, Any], count: int, store: KernelStore) -> None:
    """A value of each filter must match; nvrtc-MAJOR matches any compiler of that version."""
    found = chosen_entries(store, (), Choice(**filters))

    assert len(found) == count


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (
            {"archs": ["sm_80", "sm_75"]},
            r"arch: expected a cached one \(sm_80, sm_90a\), got",
        ),
        ({"families": ["atend"]}, r"family: expected a cached one \(attend, combine\), got"),
        ({"toolchains": ["nvrtc-1"]}, r"toolchain: expected a cached one .*, got 'nvrtc-1'"),
    ],
    ids=["arch", "family", "toolchain"],
)
def test_a_value_without_a_match_is_an_error(
    filters: dict[str, Any], message: str, store: KernelStore
) -> None:
    """An image that lacks a target fails when it is built."""
    with pytest.raises(ArgumentError, match=f"^{message}"):
        chosen_entries(store, (), Choice(**filters))


def test_keys_are_prefixes(store: KernelStore) -> None:
    """A key selects the entries of all compilers, and counts once if given twice."""
    key = key_of("attend", "sm_80").digest

    found = chosen_entries(store, (key[:8], key))

    assert [(stored.key, stored.toolchain) for stored in found] == [(key, t) for t in TOOLCHAINS]


def test_an_unknown_key_is_an_error(store: KernelStore) -> None:
    """An unknown key is bad usage."""
    with pytest.raises(ArgumentError, match=r"^key: expected a prefix of a cached key"):
        chosen_entries(store, ("123456",))


def test_an_empty_cache_is_an_error(tmp_path: Path) -> None:
    """An empty selection is bad usage."""
    store = KernelStore(tmp_path / "none", lock_dir=tmp_path, lock_timeout_s=60)

    with pytest.raises(
        ArgumentError, match=rf"^kernels: expected matching ones .*, got none in {tmp_path}"
    ):
        chosen_entries(store, ())


def test_layers_are_selected_on_request(layered: KernelStore) -> None:
    """A kernel in both places is selected once, from the cache folder."""
    own = chosen_entries(layered, ())
    both = chosen_entries(layered, (), layers=True)

    assert [stored.is_read_only for stored in own] == [False]
    assert sorted(stored.is_read_only for stored in both) == [False, True]
    assert len({stored.key for stored in both}) == 2


def test_a_key_in_a_layer_is_selected_on_request(layered: KernelStore) -> None:
    """A key alone does not select from layers."""
    key = key_of("combine", "sm_80").digest

    assert [stored.key for stored in chosen_entries(layered, (key,), layers=True)] == [key]
    with pytest.raises(ArgumentError, match=r"^kernels: expected matching ones \(--layers: "):
        chosen_entries(layered, (key,))


def test_a_damaged_entry_matches_every_filter(store: KernelStore, tmp_path: Path) -> None:
    """An omitted damaged entry would go unnoticed."""
    damaged = entry_folder(tmp_path, key_of("combine", "sm_90a"))
    (damaged / "manifest.json").unlink()

    found = chosen_entries(store, (), Choice(archs=["sm_80"], families=["attend"]))

    assert [stored.path for stored in found if stored.problem] == [damaged]
    assert len(found) == 3


def _product() -> list[tuple[str, str, str]]:
    return [(f, a, t) for f in FAMILIES for a in ARCHS for t in TOOLCHAINS]
