"""The list of what a store holds; looking creates nothing, locks nothing, and follows no link."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlagen.cache.entry import (
    MANIFEST,
    MANIFEST_MOST_BYTES,
    Manifest,
    OtherSchemaError,
    parse_manifest,
    read_entry,
    read_file,
    require_own_key,
)
from mlagen.cache.files import DamageError, read_with_status
from mlagen.cache.layout import Layout, is_digest
from mlagen.errors import CacheError


@dataclass(frozen=True)
class StoredEntry:
    """One entry as it lies on the disk, good or damaged.

    ``problem`` says why there is no ``manifest``. That there is one says that it reads as one:
    only :func:`verify` compares it with its seal, and the other files with their digests.
    """

    path: Path
    key: str
    toolchain: str
    manifest: Manifest | None
    problem: str | None
    size_bytes: int  # of a damaged one what lies there, else what its manifest says
    used: float  # when it was last used, in seconds since 1970; 0 where nothing says so
    layer: Path  # the root of the store that it lies in
    is_read_only: bool


def stored_entries(
    layout: Layout, prefix: str = "", *, is_read_only: bool = False
) -> Iterator[StoredEntry]:
    """Yield the entries whose key begins with ``prefix``, in the order of their keys.

    Those of another version of mlagen, which knows another schema, are left to it.

    Texts are put together here, not paths: of thousands of entries, those take half the time.

    Raises
    ------
    CacheError
        If a folder cannot be read.
    """
    for shard in _names_in(root := os.fspath(layout.entries)):
        if shard.startswith(prefix[:2]):
            for key in _names_in(f"{root}/{shard}"):
                if key.startswith(prefix) and is_digest(key):
                    for toolchain in _names_in(folder := f"{root}/{shard}/{key}"):
                        place = f"{folder}/{toolchain}"
                        stored = _stored_entry(place, key, toolchain, layout.root, is_read_only)
                        if stored is not None:
                            yield stored


def verify(stored: StoredEntry) -> str | None:
    """Read every file of an entry and return what is wrong with it, or None."""
    try:
        entry = read_entry(stored.path, key=stored.key, toolchain=stored.toolchain)
        for name in entry.manifest.files:
            read_file(stored.path, name, entry.manifest)
        require_own_key(entry.manifest)
    except (DamageError, OSError) as error:
        return str(error)
    return None


def _stored_entry(
    place: str, key: str, toolchain: str, layer: Path, is_read_only: bool
) -> StoredEntry | None:
    manifest, problem, used = None, None, 0.0
    try:
        text, status = read_with_status(f"{place}/{MANIFEST}", most_bytes=MANIFEST_MOST_BYTES)
        used = min(status.st_mtime, time.time())
        manifest = parse_manifest(text, key=key, toolchain=toolchain, checks_seal=False)
        size_bytes = len(text) + sum([file.size for file in manifest.files.values()])
    except OtherSchemaError:
        return None
    except (DamageError, OSError, TypeError) as error:
        manifest, problem, size_bytes = None, str(error), _size_of(place)
    return StoredEntry(
        Path(place), key, toolchain, manifest, problem, size_bytes, used, layer, is_read_only
    )


def _size_of(folder: str) -> int:
    try:
        statuses = [entry.stat(follow_symlinks=False) for entry in os.scandir(folder)]
    except OSError:
        return 0  # gone meanwhile, or no folder: the problem says so
    return sum(status.st_size for status in statuses if stat.S_ISREG(status.st_mode))


def _names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - of thousands, no object for each
    except (FileNotFoundError, NotADirectoryError):
        return []  # no cache yet, an entry removed meanwhile, or a stray file
    except OSError as error:
        message = f"cache: expected a readable folder, got {error.strerror}: {folder}"
        raise CacheError(message, path=Path(folder)) from error
