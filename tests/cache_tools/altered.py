"""Cache entries without a compilation: by the thousand, or as of another installation or time."""

from __future__ import annotations

import hashlib
import json
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
_HEAD_DIM = "HEAD DIM"  # replaced by that of each kernel
_OPTIONS = {"gpu-architecture": "sm_90a", "no-cache": "", "std": "c++17", "fmad": "true"}


def fill(root: Path, count: int) -> list[str]:
    """Fill a new cache folder with ``count`` valid kernels; return their keys.

    They differ in the head dim, and share their files by hard links.
    """
    source = Source(text="// a kernel\n" * 200, origins=("kernel.cuh:1",) * 200)
    code = b"\x7fELF" + bytes(4096)
    cubin = Cubin(code=code, log="", resources=(_RESOURCES,), toolchain=TOOLCHAIN, compile_ms=97.7)
    build = build_of(source, cubin, spec=_spec_of(_HEAD_DIM), symbol="combine", shared_bytes=0)
    sample = _key_of(_HEAD_DIM)
    # Of thousands, only the texts differ: the manifest, and the one that its seal is a digest of.
    manifest = Manifest.of(sample, build, created_by="prewarm").to_json().decode()
    body = json.loads(manifest)
    seal, sealed = body.pop("seal"), json.dumps(body, sort_keys=True)
    root.mkdir(mode=0o700)
    for name, content in build.files.items():
        (root / name).write_bytes(content)
    layout, keys = Layout(root), []
    for number in range(count):
        key = _key_of(str(number)).digest
        own = [
            text.replace(sample.digest, key).replace(_HEAD_DIM, str(number))
            for text in (sealed, manifest)
        ]
        own_seal = hashlib.sha256(own[0].encode()).hexdigest()
        folder = os.fspath(layout.entry(key, TOOLCHAIN))
        os.makedirs(folder, mode=0o700)  # noqa: PTH103 - of thousands, no path for each
        with open(f"{folder}/manifest.json", "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(own[1].replace(seal, own_seal))
        for name in build.files:
            os.link(f"{root}/{name}", f"{folder}/{name}")
        keys.append(key)
    return keys


def _key_of(head_dim: str) -> CacheKey:
    return CacheKey(
        (
            ("family", "combine"),
            *((f"spec.{name}", value) for name, value in _spec_of(head_dim).items()),
            *((f"option.{name}", value) for name, value in _OPTIONS.items()),
            ("templates", "0" * 64),
        ),
        TOOLCHAIN,
    )


def _spec_of(head_dim: str) -> dict[str, str]:
    return {"arch": "sm_90a", "dtype": "bf16", "head_dim_vo": head_dim}
