"""The list of what a store holds; looking creates nothing, locks nothing, and follows no link."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlagen.cache.entry import Manifest, read_entry, read_file, read_manifest
from mlagen.cache.files import DamageError
from mlagen.cache.layout import Layout
from mlagen.errors import CacheError

_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredEntry:
    """One entry as it lies on the disk, good or damaged.

    ``problem`` says why there is no ``manifest``; that there is one says nothing about the other
    files, which :func:`verify` reads.
    """

    path: Path
    key: str
    toolchain: str
    manifest: Manifest | None
    problem: str | None
    size_bytes: int


def stored_entries(layout: Layout, prefix: str = "") -> Iterator[StoredEntry]:
    """Yield the entries whose key begins with ``prefix``, in the order of their keys.

    Raises
    ------
    CacheError
        If a folder cannot be read.
    """
    for shard in _names_in(layout.entries):
        if shard.startswith(prefix[:2]):
            for key in _names_in(layout.entries / shard):
                if key.startswith(prefix) and _KEY.fullmatch(key):
                    for toolchain in _names_in(layout.entries / shard / key):
                        yield _stored_entry(layout.entries / shard / key / toolchain)


def verify(stored: StoredEntry) -> str | None:
    """Read every file of an entry and return what is wrong with it, or None."""
    try:
        entry = read_entry(stored.path, key=stored.key, toolchain=stored.toolchain)
        for name in entry.manifest.files:
            read_file(stored.path, name, entry.manifest)
    except (DamageError, OSError) as error:
        return str(error)
    return None


def _stored_entry(path: Path) -> StoredEntry:
    key, toolchain = path.parts[-2:]
    manifest, problem = None, None
    try:
        manifest = read_manifest(path, key=key, toolchain=toolchain)
    except (DamageError, OSError) as error:
        problem = str(error)
    return StoredEntry(path, key, toolchain, manifest, problem, _size_of(path))


def _size_of(folder: Path) -> int:
    try:
        statuses = [entry.stat(follow_symlinks=False) for entry in os.scandir(folder)]
    except OSError:
        return 0  # gone meanwhile, or no folder: the problem says so
    return sum(status.st_size for status in statuses if stat.S_ISREG(status.st_mode))


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []  # no cache yet, an entry removed meanwhile, or a stray file
    except OSError as error:
        message = f"cache: expected a readable folder, got {error.strerror}: {folder}"
        raise CacheError(message, path=folder) from error
