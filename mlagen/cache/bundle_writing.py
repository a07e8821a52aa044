"""Bundle export: every file is verified when it is read, and the result is written atomically."""

from __future__ import annotations

import errno
import gzip
import os
import secrets
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, BinaryIO

from mlagen.cache.bundle import (
    INDEX,
    INDEX_MAX_BYTES,
    BundledEntry,
    BundleError,
    BundleSummary,
    bundled_manifest,
    index_to_json,
    total_bytes,
)
from mlagen.cache.bundle_members import digest_of
from mlagen.cache.catalog import StoredEntry, read_stored
from mlagen.cache.entry import CUBIN, MANIFEST, Manifest, read_file, read_manifest, require_cubin
from mlagen.cache.files import DamageError, sync_folder
from mlagen.cache.folder import Folder
from mlagen.errors import MlagenError

_SPOOLED_BYTES = 64 << 20  # in memory; larger bundles spool to a temporary file

OnProgress = Callable[[int, int], None]  # bytes done, total bytes


def write_bundle(
    stored: Sequence[StoredEntry], file: BinaryIO, *, on_progress: OnProgress | None = None
) -> BundleSummary:
    """Write a bundle of entries into an empty, readable file.

    Raises
    ------
    BundleError
        If an entry is damaged, or all of them are gone.
    CacheError
        If other users can change one.
    OSError
        If the file cannot be written.
    """
    # The table of contents comes first, and an entry may be removed during the export: all entries
    # are read before the first byte is written.
    with SpooledTemporaryFile(max_size=_SPOOLED_BYTES) as spool:
        entries = []
        for entry, contents in verified_entries(stored):
            entries.append(entry)
            for member, name, _ in entry.members():
                _write_member(spool, member, contents[name])
        spool.seek(0)
        done, total = 0, total_bytes(entries)
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0) as tar:
            _write_member(tar, INDEX, _index(entries))
            for entry in entries:
                tar.write(spool.read(sum(_member_bytes(one.size) for one in entry.files.values())))
                done += entry.size_bytes
                if on_progress is not None:
                    on_progress(done, total)
            tar.write(bytes(2 * tarfile.BLOCKSIZE))
    return bundle_summary(file, entries)


def export_bundle(
    stored: Sequence[StoredEntry], target: Path, *, on_progress: OnProgress | None = None
) -> BundleSummary:
    """Write a bundle to ``target`` atomically; an existing file stays until then.

    Raises
    ------
    BundleError
        If an entry is damaged, or the file cannot be written.
    """
    with atomic_file(target) as file:
        return write_bundle(stored, file, on_progress=on_progress)


def verified_entries(
    stored: Sequence[StoredEntry],
) -> Iterator[tuple[BundledEntry, dict[str, bytes]]]:
    """Yield each entry with its verified files, in the order of their keys.

    An entry that was removed since listing is skipped.

    Raises
    ------
    BundleError
        If an entry is damaged, or all of them are gone.
    CacheError
        If other users can change one.
    """
    is_empty = True
    for one in sorted(stored, key=lambda one: (one.key, one.toolchain)):
        with suppress(FileNotFoundError):
            with _damage_as_bundle_error(one.path):
                found = read_stored(one, partial(_read, one))
            is_empty = False
            yield found
    if stored and is_empty:
        path = stored[0].layer
        raise BundleError(
            f"bundle: expected kernels, got none, all were removed: {path}", path=path
        )


def _read(stored: StoredEntry, folder: Folder) -> tuple[BundledEntry, dict[str, bytes]]:
    manifest = read_manifest(folder, key=stored.key, toolchain=stored.toolchain)
    entry = BundledEntry.of(manifest)
    entry.require_valid()
    contents = {name: _content(folder, name, manifest) for name in entry.files}
    bundled_manifest(contents[MANIFEST], entry)
    require_cubin(contents[CUBIN])
    return entry, contents


def bundle_summary(file: BinaryIO, entries: Sequence[BundledEntry]) -> BundleSummary:
    """Return entries, size and SHA-256 of the bundle written into ``file``."""
    sha256, size_bytes = digest_of(file)
    return BundleSummary(entries=tuple(entries), size_bytes=size_bytes, sha256=sha256)


@contextmanager
def atomic_file(target: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``target`` at the end; an error deletes it.

    A symbolic link stays: the file that it leads to is replaced.

    Raises
    ------
    BundleError
        If writing fails, or ``target`` is not a regular file.
    """
    with _as_bundle_error(target):
        place = _replaceable(target)
        part = place.parent / f".mlagen.{os.getpid()}.{secrets.token_hex(4)}.part"
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(
                os.open(part, flags, 0o666), "w+b"
            ) as file:  # not 0o600: a bundle is meant for sharing
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.rename(place)
            with suppress(OSError):  # visible already; the sync guards against power failure only
                sync_folder(place.parent)
        finally:
            with suppress(OSError):  # already renamed on success
                part.unlink()


def require_target(target: Path) -> None:
    """Reject a target that :func:`atomic_file` cannot write, before long work.

    Raises
    ------
    BundleError
        If ``target`` is not a regular file in a writable folder.
    """
    with _as_bundle_error(target):
        folder = _replaceable(target).parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def _replaceable(target: Path) -> Path:
    """Return the path to replace for ``target``: where a symbolic link leads to."""
    place = Path(os.path.realpath(target))
    if not place.parent.exists():
        rule = "expected a file in a folder that exists"
        raise BundleError(f"bundle: {rule}, got {target}", path=target)
    with suppress(FileNotFoundError):  # not `exists`, to which a loop of links is absent
        if not stat.S_ISREG(target.stat().st_mode):
            raise BundleError(f"bundle: expected a file, got another kind: {target}", path=target)
    return place


def _index(entries: Sequence[BundledEntry]) -> bytes:
    index = index_to_json(entries)
    if len(index) > INDEX_MAX_BYTES:
        rule = f"expected a table of contents of at most {INDEX_MAX_BYTES} bytes"
        raise BundleError(
            f"bundle: {rule}, got {len(index)}; export fewer entries", path=Path(INDEX)
        )
    return index


def _content(folder: Folder, name: str, manifest: Manifest) -> bytes:
    return manifest.to_json() if name == MANIFEST else read_file(folder, name, manifest)


def _write_member(tar: IO[bytes] | gzip.GzipFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)  # no owner, time 0
    info.size = len(content)
    tar.write(info.tobuf(tarfile.USTAR_FORMAT, "ascii"))
    tar.write(content)
    tar.write(bytes(-len(content) % tarfile.BLOCKSIZE))


def _member_bytes(size: int) -> int:
    """Return the bytes of a file of that size in a tar, with header and padding."""
    return tarfile.BLOCKSIZE + size + -size % tarfile.BLOCKSIZE


@contextmanager
def _damage_as_bundle_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except DamageError as error:
        message = f"bundle: expected a valid entry, got a damaged one: {error}: {folder}"
        raise BundleError(message, path=folder) from error


@contextmanager
def _as_bundle_error(target: Path) -> Iterator[None]:
    try:
        yield
    except MlagenError:
        raise
    except OSError as error:
        message = f"bundle: expected a writable file, got {error.strerror or error}: {target}"
        raise BundleError(message, path=target) from error
