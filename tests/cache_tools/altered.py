"""Cache entries without a compilation: by the thousand, or as of another installation or time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mlagen.artifacts import Cubin, Resources, Source, build_of
from mlagen.cache.file import Manifest, encode, file_of
from mlagen.cache.folder import Folder
from mlagen.cache.key import CacheKey
from mlagen.settings import current_settings
from tests.cache.builds import TOOLCHAIN, Parts, edit
from tests.fixture_types import Patch


def damage(path: Path) -> Path:
    """Flip a bit of a cached cubin and return the path of its entry."""
    edit(path, _flipped)
    return path


def _flipped(file: bytes) -> bytes:
    parts = Parts.of(file)
    middle = file.index(parts.cubin) + len(parts.cubin) // 2
    return file[:middle] + bytes([file[middle] ^ 1]) + file[middle + 1 :]


def recast(
    path: Path,
    *,
    toolchain: str | None = None,
    key_fields: Mapping[str, str] | None = None,
    created: Mapping[str, object] | None = None,
    facts: Mapping[str, object] | None = None,
    keeps: bool = False,
) -> Path:
    """Turn an entry into another one with the key of its changed fields; return its path.

    The original is removed unless ``keeps`` is true.
    """
    parts = Parts.of(path.read_bytes())
    manifest = Manifest.from_json(parts.manifest)
    changed = dict(manifest.key_fields) | dict(key_fields or {})
    key = CacheKey(tuple(changed.items()), toolchain or manifest.toolchain)
    file = parts.sealed(
        key=key.digest,
        toolchain=key.toolchain,
        key_fields=key.key_fields,
        created={**manifest.created, **(created or {})},
        facts={**manifest.facts, **(facts or {})},
    )
    if not keeps:
        path.unlink()
    place = Folder(path.parents[2]).path_of(key.digest, key.toolchain)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    place.write_bytes(file)
    place.chmod(0o600)
    return place


def manifest_of(path: Path) -> Manifest:
    """Return the manifest of an entry."""
    return Manifest.from_json(Parts.of(path.read_bytes()).manifest)


def use(path: Path, *, age_s: float, now: float) -> None:
    """Set the last use of an entry to this many seconds ago."""
    os.utime(path, (now - age_s, now - age_s))


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

    They differ in the head dim.
    """
    source = Source(text="// a kernel\n" * 200, origins=("kernel.cuh:1",) * 200)
    code = b"\x7fELF" + bytes(4096)
    cubin = Cubin(code=code, log="", resources=(_RESOURCES,), toolchain=TOOLCHAIN, compile_ms=97.7)
    build = build_of(source, cubin, spec=_spec_of(_HEAD_DIM), symbol="combine", shared_bytes=0)
    sample, folder, keys = _key_of(_HEAD_DIM), Folder(root), []
    # Of thousands, only the texts of the manifests differ.
    text, _, packed = Parts.of(encode(sample, build, created_by="prewarm")[1])
    for number in range(count):
        key, head_dim = _key_of(str(number)).digest, str(number).encode()
        own = text.replace(sample.digest.encode(), key.encode())
        path = os.fspath(folder.path_of(key, TOOLCHAIN))
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120
        with open(path, "wb") as file:  # noqa: PTH123 - of thousands, no path for each
            file.write(file_of(own.replace(_HEAD_DIM.encode(), head_dim), code, packed))
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
