"""Cache entries changed to look like those of another installation, compiler or time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mlagen.cache.entry import Manifest
from mlagen.cache.key import CacheKey
from mlagen.cache.layout import Layout
from mlagen.settings import current_settings
from tests.fixture_types import Patch


def damage(folder: Path) -> Path:
    """Flip a bit of a cached cubin and return its path."""
    path = folder / "kernel.cubin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def recast(
    folder: Path,
    *,
    toolchain: str | None = None,
    key_fields: Mapping[str, str] | None = None,
    created: Mapping[str, object] | None = None,
    facts: Mapping[str, object] | None = None,
    keeps: bool = False,
) -> Path:
    """Turn an entry into another one with the key of its changed fields; return its folder.

    The original is removed unless ``keeps`` is true.
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
    moved = folder.parents[4] / "aside"
    shutil.copytree(folder, moved)
    if not keeps:
        shutil.rmtree(folder)
    place.parent.mkdir(parents=True, exist_ok=True)
    moved.rename(place)
    (place / "manifest.json").write_bytes(manifest.to_json())
    return place


def use(folder: Path, *, age_s: float, now: float) -> None:
    """Set the last use of an entry to this many seconds ago."""
    os.utime(folder / "manifest.json", (now - age_s, now - age_s))


def move_to_layer(cache_dir: Path, monkeypatch: Patch) -> Path:
    """Move all cached entries into a read-only layer, and return the layer."""
    layer = cache_dir.with_name("layer")
    cache_dir.rename(layer)
    monkeypatch.setenv("MLAGEN_CACHE_RO", str(layer))
    current_settings.cache_clear()
    return layer


def snapshot(folder: Path) -> list[tuple[str, int, int]]:
    """Return every path below a folder with its size and modification time."""
    return sorted(
        (str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")
    )
