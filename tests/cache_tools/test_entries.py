"""Entries as options select them: by key, target, family, compiler and age."""

from __future__ import annotations

import os
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cache_tools.options.chosen import chosen_entries
from cache_tools.options.entry_options import Choice, is_older, names_of
from cache_tools.tools.entries import document_of, entries_of, iso_time
from cache_tools.tools.installation import matches_sources, matches_toolchain, required_toolchain
from mlagen.cache.default_store import kernel_store
from mlagen.cache.key import CacheKey
from mlagen.cache.store import KernelStore
from mlagen.codegen.sources import template_digests
from mlagen.errors import ArgumentError
from tests.cache.builds import entry_folder, make_build

from .altered import use
from .conftest import Cached, Documented, Run, Setting

TOOLCHAINS = ("nvrtc-12.8.1", "nvrtc-13.5.37")
EVERY = [(f, a, t) for f in ("attend", "combine") for a in ("sm_80", "sm_90a") for t in TOOLCHAINS]


def key_of(family: str, arch: str, toolchain: str = TOOLCHAINS[1]) -> CacheKey:
    """Return the key of a small kernel."""
    return CacheKey((("family", family), ("spec.arch", arch)), toolchain)


def make_store(root: Path, *keys: CacheKey, layers: tuple[Path, ...] = ()) -> KernelStore:
    """Return a store with these kernels."""
    store = KernelStore(root, lock_dir=root.parent / "locks", lock_timeout_s=60, layers=layers)
    for key in keys:
        store.find_or_build(key, lambda: make_build(toolchain=key.toolchain))  # noqa: B023 - at once
    return store


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Return a store with two kernels for two targets by two compilers, of which one is old."""
    store = make_store(tmp_path / "cache", *(key_of(*each) for each in EVERY))
    use(entry_folder(tmp_path, key_of(*EVERY[0])), age_s=300, now=time.time())
    return store


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({}, 8),
        ({"archs": ["sm_80"]}, 4),
        ({"archs": ["sm_80", "sm_90a"]}, 8),
        ({"families": ["attend"]}, 4),
        ({"toolchains": ["nvrtc-13.5.37"]}, 4),
        ({"toolchains": ["nvrtc-13"]}, 4),
        ({"archs": ["sm_90a"], "families": ["combine"], "toolchains": ["nvrtc-12.8.1"]}, 1),
        ({"age_s": 60}, 1),
        ({"age_s": 60, "archs": ["sm_80"]}, 1),
    ],
    ids=str,
)
def test_filters_combine(filters: dict[str, Any], count: int, store: KernelStore) -> None:
    """A value of each filter must match, and the age; chosen entries are sorted by key."""
    choice = Choice(**filters)

    found = [(each.key, each.toolchain) for each in chosen_entries(store, (), choice)]

    assert sum(choice.matches(stored) for stored in store.entries()) == count
    assert found == sorted(found)
    assert "age_s" in filters or len(found) == count


@pytest.mark.parametrize(
    ("keys", "filters", "message"),
    [
        ((), {"archs": ["sm_80", "sm_75"]}, "arch: expected a cached one (sm_80, sm_90a), got"),
        ((), {"families": ["atend"]}, "family: expected a cached one (attend, combine), got"),
        ((), {"toolchains": ["nvrtc-1"]}, "toolchain: expected a cached one ("),
        (("123456",), {}, "key: expected a prefix of a cached key"),
    ],
)
def test_a_value_without_a_match_is_an_error(
    keys: tuple[str, ...], filters: dict[str, Any], message: str, store: KernelStore
) -> None:
    """An image that lacks a target fails when it is built."""
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
        chosen_entries(store, keys, Choice(**filters))


def test_a_key_selects_all_compilers_once(store: KernelStore) -> None:
    """Keys are prefixes, and a key given twice counts once."""
    key = key_of("attend", "sm_80").digest

    found = chosen_entries(store, (key[:8], key))

    assert [(stored.key, stored.toolchain) for stored in found] == [(key, t) for t in TOOLCHAINS]


def test_layers_are_selected_on_request(tmp_path: Path) -> None:
    """A kernel in both places is selected once, from the cache folder; a key asks for no layer."""
    both, other = key_of("attend", "sm_80"), key_of("combine", "sm_80")
    make_store(tmp_path / "cache", both)
    make_store(tmp_path / "layer", both, other)
    layered = make_store(tmp_path / "cache", layers=(tmp_path / "layer",))

    found = chosen_entries(layered, (), layers=True)

    assert {stored.key: stored.is_read_only for stored in found} == {
        both.digest: False,
        other.digest: True,
    }
    assert [stored.key for stored in chosen_entries(layered, ())] == [both.digest]
    for keys in ((), (other.digest,)):
        assert len(chosen_entries(layered, keys, layers=True)) == len(found) - len(keys)
    with pytest.raises(ArgumentError, match=r"^kernels: expected matching ones \(--layers: "):
        chosen_entries(layered, (other.digest,))


def test_a_damaged_entry_matches_every_filter(store: KernelStore, tmp_path: Path) -> None:
    """An omitted one would go unnoticed; the path has its compiler, and its age is infinite."""
    damaged = entry_folder(tmp_path, key_of("combine", "sm_90a"))
    (damaged / "manifest.json").unlink()

    found = chosen_entries(store, (), Choice(archs=["sm_80"], families=["attend"]))

    (stored,) = [stored for stored in found if stored.problem]
    assert (stored.path, len(found)) == (damaged, 3)
    assert names_of(stored, "toolchain") == {TOOLCHAINS[1], "nvrtc-13"}
    assert names_of(stored, "arch") == names_of(stored, "family") == set()
    assert is_older(stored, 1e9)
    document = document_of(stored)
    assert document["problem"].startswith("manifest.json: expected a regular file, got nothing")
    assert [name for name, value in document.items() if value is not None] == [
        *("key", "toolchain", "path", "layer", "is_read_only", "size_bytes", "problem")
    ]


@pytest.mark.parametrize("digits", [6, 8, 64])
def test_a_key_prefix_is_enough(digits: int, cached: Cached) -> None:
    """Six digits or more identify an entry, in upper case too."""
    (found,) = entries_of(kernel_store(), cached.keys[0][:digits].upper())

    assert found.key == cached.keys[0]


def test_an_invalid_or_ambiguous_prefix_is_rejected(
    cached: Cached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message defines a key, or has enough digits of each key to distinguish them."""
    store = kernel_store()
    everything = list(store.entries())
    keys = ", ".join(sorted(key[:10] for key in cached.keys))
    messages = {
        "abc": "key: expected 6 to 64 lower-case hex digits, got 'abc'",
        "kernel": "key: expected 6 to 64 lower-case hex digits, got 'kernel'",
        "abcdef": f"key: expected more digits than abcdef, got several keys: {keys}",
    }

    for prefix, message in messages.items():
        if prefix == "abcdef":
            monkeypatch.setattr(store, "select", lambda _prefix: everything)
        with pytest.raises(ArgumentError, match=f"^{message}$"):
            entries_of(store, prefix)


@pytest.mark.parametrize("seconds", [-(2.0**40), 2.0**40, -1e300, 1e300, float("inf"), 0.0])
def test_a_time_that_is_no_date_is_none(seconds: float) -> None:
    """A file system stores any number as a time."""
    assert iso_time(seconds) is None


@pytest.mark.parametrize("seconds", [-(2**40), -(2**34), 2**34])
def test_entries_of_any_time_are_listed(seconds: int, run: Run, cached: Cached) -> None:
    """An invalid time in a manifest stops no command."""
    for manifest in cached.root.rglob("manifest.json"):
        os.utime(manifest, (seconds, seconds))

    for command in ("ls", "ls --sort age", f"show {cached.keys[0]}", "stats", "verify"):
        for option in ((), ("--json",)):
            assert run("cache", *command.split(), *option).exit_code == 0
    assert run("cache", "prune", "--older-than", "1d", "--dry-run").exit_code == 0


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_compile_time_that_is_not_finite_is_damage(
    value: str, cached: Cached, document: Documented
) -> None:
    """JSON has no such numbers, so none is printed."""
    manifest = cached.folders[0] / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(re.sub(r'"compile_ms": [^,}]+', f'"compile_ms": {value}', text))

    listed = document("cache", "ls")["entries"]

    assert sum(entry["problem"] is not None for entry in listed) == 1


@pytest.mark.usefixtures("cached")
def test_entries_match_this_installation_or_do_not() -> None:
    """Sources and compiler are those of the keys; nvrtc-MAJOR accepts any of that version."""
    valid = next(kernel_store().entries())
    own = str(required_toolchain())

    assert matches_sources(valid, template_digests())
    assert not matches_sources(valid, {"0" * 64})
    toolchains = (own, own.partition(".")[0], "nvrtc-12.8.1", None)
    assert [matches_toolchain(valid, each) for each in toolchains] == [True, True, False, False]
    (valid.path / "manifest.json").write_text("{")
    (damaged,) = [each for each in kernel_store().entries() if each.key == valid.key]
    assert not matches_sources(damaged, template_digests())


def test_without_bindings_there_is_no_toolchain(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with an unknown CUDA version is no error."""

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    setting("MLAGEN_TOOLCHAIN", "compatible")
    monkeypatch.setattr(metadata, "version", missing)

    assert required_toolchain() is None
