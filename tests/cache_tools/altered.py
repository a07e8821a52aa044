"""Entries as another installation, another compiler or another time would have left them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from mlagen.cache.entry import Manifest
from mlagen.cache.key import CacheKey
from mlagen.cache.layout import Layout
from mlagen.prewarming import PrewarmUnit
from mlagen.settings import current_settings


def folder_of(unit: PrewarmUnit, cache_dir: Path) -> Path:
    """Return the folder of a cached kernel."""
    return Layout(cache_dir).entry(unit.key, unit.toolchain)


def recast(
    folder: Path,
    *,
    toolchain: str | None = None,
    key_fields: Mapping[str, str] | None = None,
    created: Mapping[str, object] | None = None,
    facts: Mapping[str, object] | None = None,
    keeps: bool = False,
) -> Path:
    """Make an entry another one, under the key that it has then; return its folder.

    The first one is gone, unless ``keeps`` says that it stays.
    """
    manifest = Manifest.from_json((folder / "manifest.json").read_bytes())
    changed = dict(manifest.key_fields) | dict(key_fields or {})
    key = CacheKey(tuple(changed.items()), toolchain or manifest.toolchain)
    manifest = replace(
        manifest,
        key=key.digest,
        toolchain=key.toolchain,
        key_fields=key.key_fields,
        created={**manifest.created, **(created or {})},
        facts={**manifest.facts, **(facts or {})},
    )
    place = Layout(folder.parents[4]).entry(key.digest, key.toolchain)
    aside = folder.parents[4] / "aside"
    shutil.copytree(folder, aside)
    if not keeps:
        shutil.rmtree(folder)
    place.parent.mkdir(parents=True, exist_ok=True)
    aside.rename(place)
    (place / "manifest.json").write_bytes(manifest.to_json())
    return place


def use(folder: Path, *, age_s: float, now: float) -> None:
    """Let an entry be used last so long ago."""
    os.utime(folder / "manifest.json", (now - age_s, now - age_s))


def move_to_layer(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let all that is cached lie in a read-only layer instead, and return that."""
    layer = cache_dir.with_name("layer")
    cache_dir.rename(layer)
    monkeypatch.setenv("MLAGEN_CACHE_RO", str(layer))
    current_settings.cache_clear()
    return layer


def snapshot(folder: Path) -> list[tuple[str, int, int]]:
    """Return every path below a folder with its size and its time of change."""
    return sorted(
        (str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")
    )
