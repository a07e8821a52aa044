"""In what kernels differ, and which one is the nearest."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cache_tools.differences import (
    Difference,
    differences,
    kernel_of,
    key_of_entry,
    nearest_of,
    print_differences,
)
from mlagen.cache.key import CacheKey
from mlagen.cache.store import KernelStore
from tests.cache.builds import entry_folder, make_build, make_store

from .altered import use

NEWEST = "nvrtc-13.5.37"


def make_key(toolchain: str = NEWEST, **key_fields: str) -> CacheKey:
    """Return the key of a small kernel."""
    told = {"family": "attend", "spec.arch": "sm_80", "spec.page_size": "64"} | {
        name.replace("__", "."): value for name, value in key_fields.items()
    }
    return CacheKey(tuple(told.items()), toolchain)


def fill(folder: Path, *keys: CacheKey) -> KernelStore:
    """Return a store with entries for these keys."""
    store = make_store(folder)
    for key in keys:
        store.find_or_build(key, lambda: make_build(toolchain=key.toolchain))  # noqa: B023 - at once
    return store


def test_the_key_of_an_entry_is_the_one_it_was_made_for(tmp_path: Path) -> None:
    """Without a manifest there is none."""
    key = make_key()
    store = fill(tmp_path, key)
    (sound,) = store.entries()
    (entry_folder(tmp_path, key) / "manifest.json").unlink()
    (damaged,) = store.entries()

    assert key_of_entry(sound) == key
    assert key_of_entry(damaged) is None


def test_a_kernel_is_written_as_messages_write_it() -> None:
    """Only what belongs to the spec is in it."""
    key = make_key(option__std="c++17", templates="0" * 64)

    assert kernel_of(key) == "attend(arch=sm_80, page_size=64)"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("nvrtc-13", []), ("nvrtc-13.0.88", [("toolchain", "nvrtc-13.0.88", NEWEST)])],
    ids=["any of a major version", "another of the same"],
)
def test_a_compiler_that_will_do_is_no_difference(
    wanted: str, found: list[tuple[str, str, str]]
) -> None:
    """The toolchain counts where the wanted one does not accept the other."""
    assert differences(make_key(wanted), make_key(NEWEST)) == found


def test_the_fewest_differences_are_the_nearest(tmp_path: Path) -> None:
    """Kernels of another family are not compared at all."""
    near, far = make_key(spec__page_size="16"), make_key(spec__page_size="16", spec__arch="sm_90a")
    store = fill(tmp_path, near, far, make_key(family="combine"))

    found = nearest_of(make_key(), store.entries())

    assert found is not None
    assert found[0].key == near.digest
    assert found[1] == [("spec.page_size", "64", "16")]
    assert nearest_of(make_key(family="nothing like it"), store.entries()) is None


def test_of_two_that_are_as_near_the_last_used_is_taken(tmp_path: Path) -> None:
    """It is the one that somebody has more use for."""
    old, young = make_key(spec__page_size="16"), make_key(spec__page_size="32")
    store = fill(tmp_path, young, old)
    use(entry_folder(tmp_path, old), age_s=7200, now=time.time())
    use(entry_folder(tmp_path, young), age_s=3600, now=time.time())

    found = nearest_of(make_key(), store.entries())

    assert found is not None
    assert found[0].key == young.digest


def test_a_table_says_what_is_empty_and_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Digests are cut short, and explained in words."""
    found: list[Difference] = [
        ("option.x", "", None),
        ("templates", "01" * 32, "23" * 32),
    ]

    print_differences(found, "wanted", "nearest")

    header, option, templates, words = capsys.readouterr().out.splitlines()
    assert header.split() == ["ingredient", "wanted", "nearest"]
    assert option.split() == ["option.x", "(empty)", "(none)"]
    assert templates.split() == ["templates", "01010101", "23232323"]
    assert words.startswith("templates: the kernel sources differ")
