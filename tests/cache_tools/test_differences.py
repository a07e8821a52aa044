"""Differences between keys, and the nearest entry."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cache_tools.tools.differences import (
    Difference,
    differences,
    kernel_of,
    key_of_entry,
    nearest_entry,
    print_differences,
)
from mlagen.cache.key import CacheKey
from mlagen.cache.store import KernelStore
from tests.cache.builds import entry_folder, make_build, make_store

from .altered import use

NEWEST = "nvrtc-13.5.37"


def make_key(toolchain: str = NEWEST, **key_fields: str) -> CacheKey:
    """Return the key of a small kernel."""
    fields = {"family": "attend", "spec.arch": "sm_80", "spec.page_size": "64"} | {
        name.replace("__", "."): value for name, value in key_fields.items()
    }
    return CacheKey(tuple(fields.items()), toolchain)


def fill(folder: Path, *keys: CacheKey) -> KernelStore:
    """Return a store with entries for these keys."""
    store = make_store(folder)
    for key in keys:
        store.find_or_build(key, lambda: make_build(toolchain=key.toolchain))  # noqa: B023 - at once
    return store


def test_the_key_of_an_entry_is_rebuilt_from_its_manifest(tmp_path: Path) -> None:
    """An entry without a manifest has no key."""
    key = make_key()
    store = fill(tmp_path, key)
    (valid,) = store.entries()
    (entry_folder(tmp_path, key) / "manifest.json").unlink()
    (damaged,) = store.entries()

    assert key_of_entry(valid) == key
    assert key_of_entry(damaged) is None


def test_a_kernel_is_formatted_as_in_messages() -> None:
    """The text has only the fields of the spec."""
    key = make_key(option__std="c++17", templates="0" * 64)

    assert kernel_of(key) == "attend(arch=sm_80, page_size=64)"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("nvrtc-13", []), ("nvrtc-13.0.88", [("toolchain", "nvrtc-13.0.88", NEWEST)])],
    ids=["any of a major version", "another of the same"],
)
def test_an_accepted_compiler_is_no_difference(
    wanted: str, found: list[tuple[str, str, str]]
) -> None:
    """The toolchain counts only if the key does not accept the other one."""
    assert differences(make_key(wanted), make_key(NEWEST)) == found


def test_the_fewest_differences_are_the_nearest(tmp_path: Path) -> None:
    """Kernels of another family are not compared."""
    near, far = make_key(spec__page_size="16"), make_key(spec__page_size="16", spec__arch="sm_90a")
    store = fill(tmp_path, near, far, make_key(family="combine"))

    found = nearest_entry(make_key(), store.entries())

    assert found is not None
    assert found[0].key == near.digest
    assert found[1] == [("spec.page_size", "64", "16")]
    assert nearest_entry(make_key(family="nothing like it"), store.entries()) is None


def test_ties_go_to_the_most_recently_used(tmp_path: Path) -> None:
    """Of two equally near entries the most recently used is returned."""
    old, young = make_key(spec__page_size="16"), make_key(spec__page_size="32")
    store = fill(tmp_path, young, old)
    use(entry_folder(tmp_path, old), age_s=7200, now=time.time())
    use(entry_folder(tmp_path, young), age_s=3600, now=time.time())

    found = nearest_entry(make_key(), store.entries())

    assert found is not None
    assert found[0].key == young.digest


def test_a_table_marks_empty_and_missing_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Digests are shortened, and explained in a sentence."""
    found: list[Difference] = [
        ("option.x", "", None),
        ("templates", "01" * 32, "23" * 32),
    ]

    print_differences(found, "wanted", "nearest")

    header, option, templates, words = capsys.readouterr().out.splitlines()
    assert header.split() == ["key_field", "wanted", "nearest"]
    assert option.split() == ["option.x", "(empty)", "(none)"]
    assert templates.split() == ["templates", "01010101", "23232323"]
    assert words.startswith("templates: the kernel sources differ")
