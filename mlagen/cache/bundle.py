"""Bundle format: a gzipped tar of cache entries whose first member is the table of contents.

::

    bundle.json                     schema, mlagen, total_bytes, entries with their files
    e/<key>/<toolchain>/<file>      the files of the entries, in the order of bundle.json

Bundles are reproducible: equal entries give equal bytes under the same zlib, because a bundle
records neither time nor host nor user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlagen import __version__
from mlagen.cache.entry import (
    CUBIN,
    MANIFEST,
    MANIFEST_MAX_BYTES,
    FileDigest,
    Manifest,
    parse_manifest,
    require_matching_key,
)
from mlagen.cache.files import DamageError
from mlagen.cache.layout import is_digest, is_toolchain
from mlagen.errors import CacheError

# Increases with every change of the table of contents or of the member names.
BUNDLE_SCHEMA = 1

INDEX = "bundle.json"
INDEX_MAX_BYTES = 32 << 20  # some 50,000 entries

# Publishing holds a whole entry in memory; kernels have a few hundred KiB.
ENTRY_MAX_BYTES = 64 << 20

DEFAULT_MAX_BYTES = 2 << 30

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class BundleError(CacheError):
    """A bundle cannot be written, or is not valid for import."""


@dataclass(frozen=True)
class BundledEntry:
    """One entry in the table of contents; ``files`` includes its manifest."""

    key: str
    toolchain: str
    family: str
    arch: str
    files: Mapping[str, FileDigest]

    @classmethod
    def of(cls, manifest: Manifest) -> BundledEntry:
        """Return the table-of-contents entry of a manifest."""
        files = {**manifest.files, MANIFEST: FileDigest.of(manifest.to_json())}
        key_fields = dict(manifest.key_fields)
        return cls(
            key=manifest.key,
            toolchain=manifest.toolchain,
            family=key_fields.get("family", ""),
            arch=key_fields.get("spec.arch", ""),
            files=dict(sorted(files.items())),
        )

    @property
    def size_bytes(self) -> int:
        """The total size of its files."""
        return sum(digest.size for digest in self.files.values())

    def members(self) -> Iterator[tuple[str, str, FileDigest]]:
        """Yield member name, file name and expected digest, in the order of the tar."""
        for name, digest in self.files.items():
            yield f"e/{self.key}/{self.toolchain}/{name}", name, digest

    def require_valid(self) -> None:
        """Raise :class:`DamageError` unless names and sizes are valid, and no name is a path."""
        if not is_digest(self.key):
            raise DamageError(f"key: expected 64 lower-case hex digits, got {self.key!r}")
        if not is_toolchain(self.toolchain):
            raise DamageError(f"toolchain: expected a name, got {self.toolchain!r}")
        for name, digest in self.files.items():
            if not _FILE.fullmatch(name):
                raise DamageError(f"file: expected a plain name, got {name!r}")
            is_size = type(digest.size) is int and digest.size >= 0
            if not is_size or not is_digest(str(digest.sha256)):
                raise DamageError(f"{name}: expected a size and a sha256, got {asdict(digest)}")
        for name in (MANIFEST, CUBIN):
            if name not in self.files:
                raise DamageError(f"{self.key}: expected a {name}, got {', '.join(self.files)}")
        sizes = {
            MANIFEST: (self.files[MANIFEST].size, MANIFEST_MAX_BYTES),
            self.key: (self.size_bytes, ENTRY_MAX_BYTES),
        }
        for name, (size, max_bytes) in sizes.items():
            if size > max_bytes:
                raise DamageError(f"{name}: expected at most {max_bytes} bytes, got {size}")


@dataclass(frozen=True, kw_only=True)
class BundleSummary:
    """Entries, size and SHA-256 of one bundle or wheel."""

    entries: tuple[BundledEntry, ...]
    size_bytes: int
    sha256: str

    @property
    def content_bytes(self) -> int:
        """The uncompressed size of all entries."""
        return total_bytes(self.entries)

    @property
    def archs(self) -> list[str]:
        """The target architectures of its kernels."""
        return sorted({entry.arch for entry in self.entries if entry.arch})

    @property
    def toolchains(self) -> list[str]:
        """The toolchains of its kernels."""
        return sorted({entry.toolchain for entry in self.entries})


def total_bytes(entries: Iterable[BundledEntry]) -> int:
    """Return the total size of all entries."""
    return sum(entry.size_bytes for entry in entries)


def index_to_json(entries: Iterable[BundledEntry]) -> bytes:
    """Return the table of contents as JSON."""
    rows = [asdict(entry) for entry in entries]
    body = {
        "schema": BUNDLE_SCHEMA,
        "mlagen": __version__,
        "total_bytes": sum(file["size"] for row in rows for file in row["files"].values()),
        "entries": rows,
    }
    return json.dumps(body, indent=1).encode() + b"\n"


def index_from_json(text: bytes, *, max_bytes: int) -> tuple[BundledEntry, ...]:
    """Return the entries of a table of contents.

    Raises
    ------
    DamageError
        If it is not a table of contents, lists an invalid entry, or exceeds ``max_bytes``.
    """
    try:
        body = json.loads(text)
        if body["schema"] != BUNDLE_SCHEMA:
            rule = f"expected schema {BUNDLE_SCHEMA}"
            raise DamageError(f"{INDEX}: {rule}, got {body['schema']!r}")
        entries = tuple(_entry(row) for row in body["entries"])
        declared_bytes = body["total_bytes"]
        for entry in entries:
            entry.require_valid()
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DamageError(f"{INDEX}: expected a table of contents, got {error!r}") from error
    if len({(entry.key, entry.toolchain) for entry in entries}) < len(entries):
        raise DamageError(f"{INDEX}: expected each entry once, got a duplicate")
    if declared_bytes != (total := total_bytes(entries)):
        raise DamageError(f"{INDEX}: expected {total} bytes in total, got {declared_bytes!r}")
    if total > max_bytes:
        raise DamageError(f"{INDEX}: expected at most {max_bytes} bytes in total, got {total}")
    return entries


def bundled_manifest(text: bytes, entry: BundledEntry) -> Manifest:
    """Return the manifest of a listed entry.

    Raises
    ------
    DamageError
        If its seal is broken, or its key, toolchain or files differ from the table of contents.
    """
    manifest = parse_manifest(text, key=entry.key, toolchain=entry.toolchain)
    require_matching_key(manifest)
    if manifest.files != {name: facts for name, facts in entry.files.items() if name != MANIFEST}:
        raise DamageError(f"{MANIFEST}: expected the files of {INDEX}, got others")
    expected = BundledEntry.of(manifest)
    if (expected.family, expected.arch) != (entry.family, entry.arch):
        rule = f"expected {entry.family!r} for {entry.arch!r}"
        raise DamageError(f"{MANIFEST}: {rule}, got {expected.family!r} for {expected.arch!r}")
    return manifest


def _entry(row: Mapping[str, Any]) -> BundledEntry:
    files = {name: FileDigest(**digest) for name, digest in row["files"].items()}
    return BundledEntry(
        key=str(row["key"]),
        toolchain=str(row["toolchain"]),
        family=str(row["family"]),
        arch=str(row["arch"]),
        files=files,
    )
