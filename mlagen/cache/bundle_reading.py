"""Bundle import: the whole bundle is verified before the first entry is published."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mlagen.cache.bundle import (
    DEFAULT_MAX_BYTES,
    INDEX,
    INDEX_MAX_BYTES,
    BundledEntry,
    BundleError,
    BundleSummary,
    bundled_manifest,
    index_from_json,
    total_bytes,
)
from mlagen.cache.bundle_members import Members, digest_of
from mlagen.cache.bundle_writing import OnProgress
from mlagen.cache.catalog import StoredEntry
from mlagen.cache.entry import CUBIN, MANIFEST, FileDigest, require_cubin
from mlagen.cache.files import DamageError
from mlagen.cache.store import KernelStore
from mlagen.errors import CacheError


@dataclass(frozen=True, kw_only=True)
class VerifiedBundle(BundleSummary):
    """A fully verified bundle; messages refer to it by ``name``."""

    file: BinaryIO
    name: str


@contextmanager
def open_bundle(path: Path) -> Iterator[BinaryIO]:
    """Open the bundle at ``path``.

    Raises
    ------
    BundleError
        If it cannot be read, or is not a regular file.
    """
    try:
        # O_NONBLOCK: opening a FIFO must not block; it is rejected below.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BundleError(
            f"bundle: expected a file, got {error.strerror}: {path}", path=path
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BundleError(f"bundle: expected a file, got another kind: {path}", path=path)
    with os.fdopen(descriptor, "rb") as file:
        yield file


def verify_bundle(
    file: BinaryIO,
    name: str,
    *,
    expect_sha256: str | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    on_progress: OnProgress | None = None,
) -> VerifiedBundle:
    """Verify a whole bundle and return its entries; nothing is stored or published.

    Parameters
    ----------
    file : BinaryIO
        The bundle; must be seekable.
    name : str
        Name of the bundle in messages.
    expect_sha256 : str, optional
        Expected digest of the whole file; compared before anything is parsed.
    max_bytes : int
        Limit for the total uncompressed size of the entries.
    on_progress : OnProgress, optional
        Called with the bytes done and the total bytes.

    Raises
    ------
    BundleError
        If any check fails.
    """
    with _bundle_errors(name):
        sha256, size_bytes = digest_of(file)
        if expect_sha256 is not None and sha256 != expect_sha256.lower():
            raise DamageError(f"expected sha256 {expect_sha256.lower()}, got {sha256}")
        members = Members(file)
        entries = index_from_json(_index(members), max_bytes=max_bytes)
        done, total = 0, total_bytes(entries)
        for entry in entries:
            _verify(members, entry)
            done += entry.size_bytes
            if on_progress is not None:
                on_progress(done, total)
        members.require_end()
    return VerifiedBundle(
        file=file,
        name=name,
        sha256=sha256,
        size_bytes=size_bytes,
        entries=entries,
    )


def import_bundle(
    bundle: VerifiedBundle,
    store: KernelStore,
    *,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> list[str]:
    """Publish the entries of a bundle that are not in the store.

    An existing entry stays, unless it is damaged and moves to the quarantine. Each entry is
    verified again while it is read, so that a file that changed since publishes nothing unverified.

    Returns
    -------
    list[str]
        For each entry of the bundle: ``added``, ``kept`` or ``replaced``; with ``dry_run``, the
        outcome that an import would have.

    Raises
    ------
    BundleError
        If the file has changed since it was verified.
    CacheError
        If the store cannot be read or written; an entry that cannot be read stays.
    """
    if dry_run:
        return [_import_outcome(store, entry)[0] for entry in bundle.entries]
    outcomes: list[str] = []
    done, total = 0, bundle.content_bytes
    with _bundle_errors(bundle.name):
        members = Members(bundle.file)
        _index(members)
        for entry in bundle.entries:
            contents = _contents(members, entry)
            outcome, damaged = _import_outcome(store, entry)
            if damaged is not None:
                store.quarantine(*damaged)
            if outcome != "kept":
                manifest = bundled_manifest(contents.pop(MANIFEST), entry)
                store.add(manifest, contents)
            outcomes.append(outcome)
            done += entry.size_bytes
            if on_progress is not None:
                on_progress(done, total)
    return outcomes


def _index(members: Members) -> bytes:
    size = members.next_size(INDEX, max_bytes=INDEX_MAX_BYTES)
    return b"".join(members.chunks(size))


def _verify(members: Members, entry: BundledEntry) -> None:
    for member, name, expected in entry.members():
        size = members.next_size(member, max_bytes=expected.size)
        digest, start, manifest = hashlib.sha256(), b"", b""
        for chunk in members.chunks(size):
            digest.update(chunk)
            start = start or chunk[:4]
            if name == MANIFEST:
                manifest += chunk
        expected.require(member, FileDigest(size, digest.hexdigest()))
        if name == CUBIN:
            require_cubin(start)
        elif name == MANIFEST:
            bundled_manifest(manifest, entry)


def _contents(members: Members, entry: BundledEntry) -> dict[str, bytes]:
    contents = {}
    for member, name, expected in entry.members():
        size = members.next_size(member, max_bytes=expected.size)
        contents[name] = b"".join(members.chunks(size))
        expected.require(member, FileDigest.of(contents[name]))
    return contents


def _import_outcome(
    store: KernelStore, entry: BundledEntry
) -> tuple[str, tuple[StoredEntry, str] | None]:
    """Return the outcome of an import, and the damaged entry to replace with its problem."""
    for stored in store.entries(prefix=entry.key):
        if stored.toolchain == entry.toolchain:
            with suppress(FileNotFoundError):  # removed since listing
                problem = store.verify(stored)
                return ("replaced", (stored, problem)) if problem else ("kept", None)
    return "added", None


@contextmanager
def _bundle_errors(name: str) -> Iterator[None]:
    try:
        yield
    except CacheError:
        raise  # an error of the store, not of the bundle
    except DamageError as error:
        raise BundleError(f"bundle: {error}: {name}", path=Path(name)) from error
    except OSError as error:
        message = f"bundle: expected a readable file, got {error.strerror or error}: {name}"
        raise BundleError(message, path=Path(name)) from error
