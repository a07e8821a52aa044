"""One published kernel: its manifest, and the verified way to read it from the disk."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mlagen import __version__
from mlagen.artifacts import Build
from mlagen.cache.files import DamageError, read_regular
from mlagen.cache.key import SCHEMA, CacheKey

MANIFEST = "manifest.json"
CUBIN = "kernel.cubin"
ELF_MAGIC = b"\x7fELF"

_MANIFEST_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class FileFacts:
    """What a file must be: its size in bytes and its SHA-256."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> FileFacts:
        """Return the facts of ``content``."""
        return cls(len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an entry is, what it was made of, by whom, and what its files must be."""

    schema: int
    key: str
    toolchain: str
    ingredients: tuple[tuple[str, str], ...]
    files: Mapping[str, FileFacts]
    facts: Mapping[str, Any]
    created: Mapping[str, Any]
    created_by: str

    @classmethod
    def of(cls, key: CacheKey, build: Build, *, created_by: str) -> Manifest:
        """Return the manifest of a finished build."""
        return cls(
            schema=SCHEMA,
            key=key.digest,
            toolchain=build.toolchain,
            ingredients=key.ingredients,
            files={name: FileFacts.of(content) for name, content in build.files.items()},
            # Through JSON, so that the builder sees exactly what a later reader sees.
            facts=json.loads(json.dumps(build.facts, allow_nan=False)),
            created={
                "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "host": os.uname().nodename,
                "pid": os.getpid(),
                "python": sys.version.partition(" ")[0],
                "mlagen": __version__,
            },
            created_by=created_by,
        )

    def to_json(self) -> bytes:
        """Return the manifest as it lies on the disk, sealed with a digest of itself."""
        body = asdict(self)
        return json.dumps({**body, "seal": _seal(body)}, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Return the manifest in ``text``; anything else is a :class:`DamageError`."""
        try:
            body = json.loads(text)
            if body["schema"] != SCHEMA:
                raise DamageError(f"{MANIFEST}: expected schema {SCHEMA}, got {body['schema']!r}")
            if body.pop("seal") != _seal(body):
                raise DamageError(f"{MANIFEST}: expected what its seal says, got other content")
            pairs = [(label, value) for label, value in body.pop("ingredients")]
            files = {name: FileFacts(**facts) for name, facts in body.pop("files").items()}
            return cls(ingredients=tuple(pairs), files=files, **body)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise DamageError(f"{MANIFEST}: expected a manifest, got {error!r}") from error


@dataclass(frozen=True)
class CacheEntry:
    """A kernel ready to be loaded.

    ``path`` is its folder, or None when it could not be published and lives in memory only.
    """

    manifest: Manifest
    cubin: bytes
    path: Path | None


def read_manifest(folder: Path, *, key: str, toolchain: str) -> Manifest:
    """Return the manifest in a folder; it must speak of that key and toolchain."""
    manifest = Manifest.from_json(read_regular(folder / MANIFEST, most_bytes=_MANIFEST_MOST_BYTES))
    if (manifest.key, manifest.toolchain) != (key, toolchain):
        got = f"{manifest.key} by {manifest.toolchain}"
        raise DamageError(f"{MANIFEST}: expected {key} by {toolchain}, got {got}")
    return manifest


def read_file(folder: Path, name: str, manifest: Manifest) -> bytes:
    """Return one file of an entry if it is what the manifest says."""
    expected = manifest.files.get(name)
    if expected is None:
        raise DamageError(f"{MANIFEST}: expected a file {name}, got {', '.join(manifest.files)}")
    content = read_regular(folder / name, most_bytes=expected.size)
    got = FileFacts.of(content)
    if got.size != expected.size:
        raise DamageError(f"{name}: expected {expected.size} bytes, got {got.size}")
    if got != expected:
        raise DamageError(f"{name}: expected sha256 {expected.sha256}, got {got.sha256}")
    return content


def read_entry(folder: Path, *, key: str, toolchain: str) -> CacheEntry:
    """Return the entry in a folder, with manifest and cubin verified.

    Raises
    ------
    DamageError
        If the folder, its manifest or its cubin is not as it was published.
    OSError
        If this process cannot read it.
    """
    manifest = read_manifest(folder, key=key, toolchain=toolchain)
    cubin = read_file(folder, CUBIN, manifest)
    if not cubin.startswith(ELF_MAGIC):
        raise DamageError(f"{CUBIN}: expected an ELF file, got {cubin[:4]!r}")
    return CacheEntry(manifest, cubin, folder)


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
