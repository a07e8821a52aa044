"""Importing a bundle: all of it is verified before the first entry is published."""

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
    Packed,
    bundled_manifest,
    index_from_json,
    total_bytes,
)
from mlagen.cache.bundle_members import Members, digest_of
from mlagen.cache.bundle_writing import OnProgress
from mlagen.cache.catalog import StoredEntry
from mlagen.cache.entry import CUBIN, MANIFEST, FileFacts, require_cubin
from mlagen.cache.files import DamageError
from mlagen.cache.store import KernelStore
from mlagen.errors import CacheError


@dataclass(frozen=True, kw_only=True)
class VerifiedBundle(Packed):
    """A bundle of which every byte was verified; ``name`` is what messages call it."""

    file: BinaryIO
    name: str


@contextmanager
def opened_bundle(path: Path) -> Iterator[BinaryIO]:
    """Give the file at ``path``.

    Raises
    ------
    BundleError
        If it cannot be read, or is no regular file.
    """
    try:
        # Without waiting: a FIFO is rejected, not waited for.
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
    """Read all of a bundle and return what it holds; nothing is kept and nothing is published.

    Parameters
    ----------
    file : BinaryIO
        The bundle; it can be read from its start as often as needed.
    name : str
        What messages call it.
    expect_sha256 : str, optional
        What the whole file must be; it is looked at before anything in it.
    max_bytes : int
        How large the entries may be together, unpacked.
    on_progress : OnProgress, optional
        Called with the bytes done and the bytes in all.

    Raises
    ------
    BundleError
        If anything is not as it must be.
    """
    with _rejections(name):
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

    An entry that is there stays, unless it is damaged: it goes to the quarantine then. Each is
    verified again on its way in, so that a file that changed meanwhile publishes nothing new.

    Returns
    -------
    list[str]
        For each entry of the bundle: ``added``, ``kept`` or ``replaced``; with ``dry_run``, what
        would come of it.

    Raises
    ------
    BundleError
        If the file has changed since it was verified.
    CacheError
        If the store cannot be read or written.
    """
    if dry_run:
        return [_standing(store, entry)[0] for entry in bundle.entries]
    outcomes: list[str] = []
    done, total = 0, bundle.content_bytes
    with _rejections(bundle.name):
        members = Members(bundle.file)
        _index(members)
        for entry in bundle.entries:
            contents = _contents(members, entry)
            outcome, damaged = _standing(store, entry)
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
    for member, name, facts in entry.members():
        size = members.next_size(member, max_bytes=facts.size)
        digest, start, manifest = hashlib.sha256(), b"", b""
        for chunk in members.chunks(size):
            digest.update(chunk)
            start = start or chunk[:4]
            if name == MANIFEST:
                manifest += chunk
        facts.require(member, FileFacts(size, digest.hexdigest()))
        if name == CUBIN:
            require_cubin(start)
        elif name == MANIFEST:
            bundled_manifest(manifest, entry)


def _contents(members: Members, entry: BundledEntry) -> dict[str, bytes]:
    contents = {}
    for member, name, facts in entry.members():
        size = members.next_size(member, max_bytes=facts.size)
        contents[name] = b"".join(members.chunks(size))
        facts.require(member, FileFacts.of(contents[name]))
    return contents


def _standing(
    store: KernelStore, entry: BundledEntry
) -> tuple[str, tuple[StoredEntry, str] | None]:
    """Return what importing an entry comes to, and the damaged one in its place with why."""
    for stored in store.entries(prefix=entry.key):
        if stored.toolchain == entry.toolchain:
            with suppress(FileNotFoundError):  # removed since it was listed
                problem = stored.problem or store.verify(stored)
                return ("replaced", (stored, problem)) if problem else ("kept", None)
    return "added", None


@contextmanager
def _rejections(name: str) -> Iterator[None]:
    try:
        yield
    except CacheError:
        raise  # the store's, not the bundle's
    except DamageError as error:
        raise BundleError(f"bundle: {error}: {name}", path=Path(name)) from error
    except OSError as error:
        message = f"bundle: expected a readable file, got {error.strerror or error}: {name}"
        raise BundleError(message, path=Path(name)) from error
