"""Listing of a store: read-only, lock-free, and without following links."""

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
    require_matching_key,
)
from mlagen.cache.errors import UnreadableError, cache_error, unreadable_text
from mlagen.cache.files import DamageError, Identity, is_gone
from mlagen.cache.folder import Folder, open_below
from mlagen.cache.layout import Layout, is_digest
from mlagen.cache.trust import UntrustedError
from mlagen.errors import CacheError

# Attempts to read an entry that is being replaced before it counts as gone.
_READ_ATTEMPTS = 100

Read = TypeVar("Read")


@dataclass(frozen=True)
class StoredEntry:
    """One entry on the disk: valid, damaged or unreadable.

    ``problem`` is the reason why there is no ``manifest``; ``is_damaged`` is False if this process
    may not read it. A manifest that is set was parsed, not verified: only :func:`verify` checks its
    seal, and the digests of the other files.
    """

    path: Path
    key: str
    toolchain: str
    manifest: Manifest | None
    problem: str | None
    is_damaged: bool
    size_bytes: int  # from the manifest; measured for a damaged entry
    used: float  # last use, in seconds since 1970; 0 if unknown
    layout: Layout  # the store that contains it
    is_read_only: bool
    identity: Identity | None  # of its folder at the time of listing

    @property
    def layer(self) -> Path:
        """The root of the store that contains it."""
        return self.layout.root


def stored_entries(
    layout: Layout, prefix: str = "", *, is_read_only: bool = False
) -> Iterator[StoredEntry]:
    """Yield the entries whose key begins with ``prefix``, in the order of their keys.

    Entries with another schema, from another version of mlagen, are skipped, and so is an entry
    that is removed while it is read.

    Raises
    ------
    CacheError
        If a folder cannot be read, or other users can change it.
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
        is_untrusted = isinstance(error, UntrustedError)  # it names its own path
        path = layout.root if is_untrusted else Path(error.filename or layout.root)
        raise cache_error(error, path, expected="readable") from error


def read_stored(stored: StoredEntry, read: Callable[[Folder], Read]) -> Read:
    """Return the result of ``read`` for the folder of an entry.

    Its errors are raised only if that folder is still in place: an entry that is removed or
    replaced meanwhile is not damaged.

    Raises
    ------
    FileNotFoundError
        If the entry is gone.
    DamageError
        If it is damaged.
    UnreadableError
        If it cannot be read.
    CacheError
        If other users can change it.
    """
    try:
        return _read_in_place(stored.layout, str(stored.path), read)
    except UntrustedError as error:
        raise cache_error(error, stored.path) from error
    except FileNotFoundError:
        raise
    except OSError as error:
        text = f"cache: {unreadable_text(error)}: {error.filename or stored.path}"
        raise UnreadableError(text, path=stored.path) from error


def verify(stored: StoredEntry) -> str | None:
    """Check every file of an entry and return the problem, or None.

    Raises
    ------
    FileNotFoundError
        If it is gone.
    UnreadableError
        If this process cannot read it.
    CacheError
        If other users can change it.
    """

    def read_all(folder: Folder) -> None:
        entry = read_entry(folder, key=stored.key, toolchain=stored.toolchain)
        for name in entry.manifest.files:
            read_file(folder, name, entry.manifest)
        require_matching_key(entry.manifest)

    try:
        read_stored(stored, read_all)
    except DamageError as error:
        return str(error)
    return None


def read_content(stored: StoredEntry, name: str) -> bytes:
    """Return one file of an entry, verified.

    Raises
    ------
    CacheError
        If the entry is gone or damaged, or other users can change it.
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
    """Implement :func:`read_stored`; the first attempt uses ``above`` if it is open."""
    try:
        if above is not None:
            with suppress(_ReplacedError):  # the folder of the key may have moved to the trash too
                return _read_once(above, path.rpartition("/")[2], read)
        *names, toolchain = Path(path).relative_to(layout.version).parts
        for _ in range(_READ_ATTEMPTS):
            with suppress(_ReplacedError), open_below(layout, *names) as key:
                return _read_once(key, toolchain, read)
    except OSError as error:
        if not is_gone(error):
            raise
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


class _ReplacedError(Exception):
    """The folder that was read is no longer in place."""


def _read_once(key: Folder, toolchain: str, read: Callable[[Folder], Read]) -> Read:
    with key.entry(toolchain) as folder:
        try:
            return read(folder)
        except (DamageError, OSError) as error:
            if folder.still_exists():
                raise
            raise _ReplacedError from error


def _stored_entry(key: Folder, toolchain: str, *, is_read_only: bool) -> StoredEntry | None:
    path, used = f"{key.path}/{toolchain}", 0.0
    manifest: Manifest | None = None
    problem, is_damaged = None, False
    seen: Identity | None = None

    def read(folder: Folder) -> tuple[Manifest, int]:
        nonlocal seen, used
        seen = folder.identity
        try:
            text, status = folder.read_with_status(MANIFEST, max_bytes=MANIFEST_MAX_BYTES)
        except OSError:  # otherwise it would count as never used, and be removed for its age
            used = min(folder.status_of(MANIFEST).st_mtime, time.time())
            raise
        used = min(status.st_mtime, time.time())
        found = parse_manifest(text, key=key.name, toolchain=toolchain, checks_seal=False)
        return found, len(text) + sum([file.size for file in found.files.values()])

    try:
        manifest, size_bytes = _read_in_place(key.layout, path, read, above=key)
    except (OtherSchemaError, FileNotFoundError):
        return None
    except UntrustedError:
        raise
    except (DamageError, OSError) as error:
        is_damaged = isinstance(error, DamageError)
        problem = unreadable_text(error) if isinstance(error, OSError) else str(error)
        size_bytes = key.size_of(toolchain)
        seen = seen or key.identity_of(toolchain)  # not set if it is not a folder
    return StoredEntry(
        path=Path(path),
        key=key.name,
        toolchain=toolchain,
        manifest=manifest,
        problem=problem,
        is_damaged=is_damaged,
        size_bytes=size_bytes,
        used=used,
        layout=key.layout,
        is_read_only=is_read_only,
        identity=seen,
    )
