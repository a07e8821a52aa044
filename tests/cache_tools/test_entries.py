"""Entries as options select them: by key, target, family, compiler and age."""

from __future__ import annotations

import os
import re
import shutil
from importlib import metadata
from pathlib import Path

import pytest

from cache_tools.options.chosen import chosen_entries
from cache_tools.options.entry_options import Choice, is_older, names_of
from cache_tools.tools.entries import entries_of, iso_time
from cache_tools.tools.installation import matches_sources, matches_toolchain, required_toolchain
from mlagen.cache.default_store import kernel_store
from mlagen.codegen.sources import template_digests
from mlagen.errors import ArgumentError
from tests.fixture_types import Patch

from .conftest import Cached, Run, Setting


def test_layers_are_selected_on_request(
    run: Run, cached: Cached, tmp_path: Path, setting: Setting
) -> None:
    """A kernel in both places is selected once, from the cache folder; a key asks for no layer."""
    layer = tmp_path / "layer"
    shutil.copytree(cached.root, layer)
    shutil.rmtree(cached.folders[1])
    setting("MLAGEN_CACHE_RO", layer)
    export = ("cache", "export", str(tmp_path / "k.tar.gz"))

    every = run.json(*export, "--layers")["entries"]
    rejected = run(*export, cached.keys[1])

    assert [entry["key"] for entry in every] == sorted(cached.keys)
    assert [entry["key"] for entry in run.json(*export)["entries"]] == cached.keys[:1]
    assert len(run.json(*export, cached.keys[1], "--layers")["entries"]) == 1
    assert rejected.exit_code == 2
    assert "mlagen: kernels: expected matching ones (--layers: " in rejected.stderr


def test_a_damaged_entry_matches_every_filter(run: Run, cached: Cached) -> None:
    """An export does not omit it, a removal by name does; its age is infinite."""
    damaged = cached.folders[0]
    (damaged / "manifest.json").unlink()
    (stored,) = [each for each in kernel_store().entries() if each.problem]

    found = chosen_entries(kernel_store(), (), Choice(archs=["sm_80"], families=["combine"]))

    assert {each.path for each in found} == set(cached.folders)
    assert names_of(stored, "toolchain") == {damaged.name, damaged.name.partition(".")[0]}
    assert names_of(stored, "arch") == names_of(stored, "family") == set()
    assert is_older(stored, 1e9)
    assert run.json("cache ls --arch sm_80")["entries"][0]["problem"] is None
    (listed,) = [each for each in run.json("cache ls")["entries"] if each["problem"]]
    assert listed["problem"].startswith("manifest.json: expected a regular file, got nothing")
    assert [name for name, value in listed.items() if value is not None] == [
        *("key", "toolchain", "path", "layer", "is_read_only", "size_bytes", "problem")
    ]


def test_a_prefix_of_six_digits_or_more_is_a_key(cached: Cached, monkeypatch: Patch) -> None:
    """It may be in upper case; the message on an ambiguous one has digits that distinguish."""
    store = kernel_store()
    everything = list(store.entries())
    keys = ", ".join(sorted(key[:10] for key in cached.keys))
    messages = {
        "abc": "key: expected 6 to 64 lower-case hex digits, got 'abc'",
        "kernel": "key: expected 6 to 64 lower-case hex digits, got 'kernel'",
        "abcdef": f"key: expected more digits than abcdef, got several keys: {keys}",
    }

    for digits in (6, 8, 64):
        (found,) = entries_of(store, cached.keys[0][:digits].upper())
        assert found.key == cached.keys[0]
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
    assert run("cache prune --older-than 1d --dry-run").exit_code == 0


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_compile_time_that_is_not_finite_is_damage(value: str, cached: Cached, run: Run) -> None:
    """JSON has no such numbers, so none is printed."""
    manifest = cached.folders[0] / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(re.sub(r'"compile_ms": [^,}]+', f'"compile_ms": {value}', text))
    listed = run.json("cache ls")["entries"]
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


def test_without_bindings_there_is_no_toolchain(setting: Setting, monkeypatch: Patch) -> None:
    """A machine with an unknown CUDA version is no error."""

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    setting("MLAGEN_TOOLCHAIN", "compatible")
    monkeypatch.setattr(metadata, "version", missing)

    assert required_toolchain() is None
