"""The list of what a store holds; looking creates nothing, locks nothing, and follows no link."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mlagen.cache.entry import (
    MANIFEST,
    MANIFEST_MAX_BYTES,
    Manifest,
    OtherSchemaError,
    parse_manifest,
    read_entry,
    read_file,
    read_manifest,
    require_own_key,
)
from mlagen.cache.errors import rejected
from mlagen.cache.files import DamageError, Identity, is_gone
from mlagen.cache.folder import Folder, open_below
from mlagen.cache.layout import Layout, is_digest
from mlagen.cache.trust import UntrustedError
from mlagen.errors import CacheError

# How often an entry may be replaced while it is read before it counts as gone.
_LOOKS = 100

Read = TypeVar("Read")


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
    layout: Layout  # the store that it lies in
    is_read_only: bool
    identity: Identity | None  # which folder it was when it was listed

    @property
    def layer(self) -> Path:
        """The root of the store that it lies in."""
        return self.layout.root


def stored_entries(
    layout: Layout, prefix: str = "", *, is_read_only: bool = False
) -> Iterator[StoredEntry]:
    """Yield the entries whose key begins with ``prefix``, in the order of their keys.

    Those of another version of mlagen, which knows another schema, are left to it, and one that is
    removed while it is read is left out.

    Raises
    ------
    CacheError
        If a folder cannot be read, or others can change it.
    """
    try:
        with open_below(layout, layout.entries.name) as entries:
            for shard in entries.folders(lambda name: name.startswith(prefix[:2])):
                for key in shard.folders(lambda name: name.startswith(prefix) and is_digest(name)):
                    for toolchain in sorted(key.names()):
                        stored = _stored_entry(key, toolchain, is_read_only=is_read_only)
                        if stored is not None:
                            yield stored
    except (FileNotFoundError, NotADirectoryError):
        pass  # no cache yet
    except OSError as error:
        is_untrusted = isinstance(error, UntrustedError)  # which says itself where
        path = layout.root if is_untrusted else Path(error.filename or layout.root)
        raise rejected(error, path, to="readable") from error


def read_stored(stored: StoredEntry, read: Callable[[Folder], Read]) -> Read:
    """Return what ``read`` makes of the folder of an entry.

    What it finds wrong is raised only if that folder is still in its place: an entry that is
    removed or replaced meanwhile is not damaged.

    Raises
    ------
    FileNotFoundError
        If the entry is gone.
    DamageError
        If it is damaged.
    CacheError
        If others can change it.
    OSError
        If it cannot be read.
    """
    try:
        return _read_in_place(stored.layout, str(stored.path), read)
    except UntrustedError as error:
        raise rejected(error, stored.path) from error


def verify(stored: StoredEntry) -> str | None:
    """Read every file of an entry and return what is wrong with it, or None.

    Raises
    ------
    FileNotFoundError
        If it is gone.
    CacheError
        If others can change it.
    """

    def read_all(folder: Folder) -> None:
        entry = read_entry(folder, key=stored.key, toolchain=stored.toolchain)
        for name in entry.manifest.files:
            read_file(folder, name, entry.manifest)
        require_own_key(entry.manifest)

    try:
        read_stored(stored, read_all)
    except (FileNotFoundError, CacheError):  # which is an OSError, too
        raise
    except (DamageError, OSError) as error:
        return str(error)
    return None


def read_content(stored: StoredEntry, name: str) -> bytes:
    """Return one file of an entry, verified.

    Raises
    ------
    CacheError
        If the entry is gone or damaged, or others can change it.
    """

    def read(folder: Folder) -> bytes:
        manifest = read_manifest(folder, key=stored.key, toolchain=stored.toolchain)
        if name == MANIFEST:
            return manifest.to_json()
        return read_file(folder, name, manifest)

    try:
        return read_stored(stored, read)
    except CacheError:
        raise
    except (DamageError, OSError) as error:
        raise CacheError(f"cache: {error}: {stored.path}", path=stored.path) from error


def _read_in_place(
    layout: Layout, path: str, read: Callable[[Folder], Read], *, above: Folder | None = None
) -> Read:
    """Do what :func:`read_stored` says; the first look is into ``above``, if that is open."""
    try:
        if above is not None:
            with suppress(_ReplacedError):  # the key may be in the trash, too
                return _read_once(above, path.rpartition("/")[2], read)
        *names, toolchain = Path(path).relative_to(layout.version).parts
        for _ in range(_LOOKS):
            with suppress(_ReplacedError), open_below(layout, *names) as key:
                return _read_once(key, toolchain, read)
    except OSError as error:
        if not is_gone(error):
            raise
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


class _ReplacedError(Exception):
    """The folder that was read is no longer in its place."""


def _read_once(key: Folder, toolchain: str, read: Callable[[Folder], Read]) -> Read:
    with key.entry(toolchain) as folder:
        try:
            return read(folder)
        except (DamageError, OSError) as error:
            if folder.is_there():
                raise
            raise _ReplacedError from error


def _stored_entry(key: Folder, toolchain: str, *, is_read_only: bool) -> StoredEntry | None:
    path, used = f"{key.path}/{toolchain}", 0.0
    manifest: Manifest | None = None
    problem: str | None = None
    seen: Identity | None = None

    def read(folder: Folder) -> tuple[Manifest, int]:
        nonlocal seen, used
        seen = folder.identity
        text, status = folder.read_with_status(MANIFEST, max_bytes=MANIFEST_MAX_BYTES)
        used = min(status.st_mtime, time.time())
        found = parse_manifest(text, key=key.name, toolchain=toolchain, checks_seal=False)
        return found, len(text) + sum([file.size for file in found.files.values()])

    try:
        manifest, size_bytes = _read_in_place(key.layout, path, read, above=key)
    except (OtherSchemaError, FileNotFoundError):
        return None
    except UntrustedError:
        raise
    except (DamageError, OSError, TypeError) as error:
        problem, size_bytes = str(error), key.size_of(toolchain)
        seen = seen or key.identity_of(toolchain)  # what is no folder was not opened
    return StoredEntry(
        path=Path(path),
        key=key.name,
        toolchain=toolchain,
        manifest=manifest,
        problem=problem,
        size_bytes=size_bytes,
        used=used,
        layout=key.layout,
        is_read_only=is_read_only,
        identity=seen,
    )
