"""Cache entries without a compilation: by the thousand, or as of another installation or time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mlagen.artifacts import Cubin, Resources, Source, build_of
from mlagen.cache.entry import Manifest
from mlagen.cache.key import CacheKey
from mlagen.cache.layout import Layout
from mlagen.settings import current_settings
from tests.cache.builds import TOOLCHAIN
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


_SIZES = dict.fromkeys(("stack_bytes", "spill_store_bytes", "spill_load_bytes"), 0)
_RESOURCES = Resources(symbol="combine", registers=32, static_shared_bytes=2064, **_SIZES)
_OPTIONS = {"gpu-architecture": "sm_90a", "no-cache": "", "std": "c++17", "fmad": "true"}


def fill(root: Path, count: int) -> list[str]:
    """Fill a new cache folder with ``count`` valid kernels; return their keys.

    They differ in the head dim, and share their files by hard links.
    """
    source = Source(text="// a kernel\n" * 200, origins=("kernel.cuh:1",) * 200)
    code = b"\x7fELF" + bytes(4096)
    cubin = Cubin(code=code, log="", resources=(_RESOURCES,), toolchain=TOOLCHAIN, compile_ms=97.7)
    build = build_of(source, cubin, spec={}, symbol="combine", shared_bytes=0)
    root.mkdir(mode=0o700)
    for name, content in build.files.items():
        (root / name).write_bytes(content)
    sample, keys = None, []
    for number in range(count):
        spec = {"arch": "sm_90a", "dtype": "bf16", "head_dim_vo": str(number)}
        key = CacheKey(
            (
                ("family", "combine"),
                *((f"spec.{name}", value) for name, value in spec.items()),
                *((f"option.{name}", value) for name, value in _OPTIONS.items()),
                ("templates", "0" * 64),
            ),
            TOOLCHAIN,
        )
        sample = sample or Manifest.of(key, build, created_by="prewarm")
        facts = {**sample.facts, "kernel": {**sample.facts["kernel"], "spec": spec}}
        manifest = replace(sample, key=key.digest, key_fields=key.key_fields, facts=facts)
        folder = os.fspath(Layout(root).entry(key.digest, TOOLCHAIN))
        os.makedirs(folder, mode=0o700)  # noqa: PTH103 - of thousands, no path for each
        with open(f"{folder}/manifest.json", "wb") as file:  # noqa: PTH123
            file.write(manifest.to_json())
        for name in build.files:
            os.link(f"{root}/{name}", f"{folder}/{name}")
        keys.append(key.digest)
    return keys
