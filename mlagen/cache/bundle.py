"""Bundles: entries as one gzipped tar, whose members are their files, named as in a cache folder.

Unpacked, a bundle is a cache folder. Equal entries give equal bytes under the same zlib, because a
bundle records neither time nor host nor user. Nothing of it is published before all of it has been
verified.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import secrets
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mlagen.cache.file import ENTRY_MAX_BYTES, DamageError, Manifest, decode_all
from mlagen.cache.folder import Folder
from mlagen.cache.store import KernelStore, StoredEntry, read_stored, verify
from mlagen.errors import CacheError, MlagenError

DEFAULT_MAX_BYTES = 2 << 30
MAX_ENTRIES = 1 << 16

_CHUNK = 1 << 20
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.DIRTYPE: "a folder",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a FIFO",
}
_NO_ROOT = Folder(Path())  # members are named relative to a cache folder

OnProgress = Callable[[int, int], None]  # bytes done, total bytes


class BundleError(CacheError):
    """A bundle cannot be written, or is not valid for import."""


@dataclass(frozen=True)
class BundledEntry:
    """One entry of a bundle or wheel."""

    key: str
    toolchain: str
    family: str
    arch: str
    size_bytes: int

    @classmethod
    def of(cls, manifest: Manifest, size_bytes: int) -> BundledEntry:
        """Return the entry with a manifest, whose file has that size."""
        key_fields = dict(manifest.key_fields)
        return cls(
            key=manifest.key,
            toolchain=manifest.toolchain,
            family=key_fields.get("family", ""),
            arch=key_fields.get("spec.arch", ""),
            size_bytes=size_bytes,
        )

    @property
    def member(self) -> str:
        """Its name in the bundle."""
        return str(_NO_ROOT.path_of(self.key, self.toolchain))


@dataclass(frozen=True, kw_only=True)
class BundleSummary:
    """Entries, size and SHA-256 of one bundle or wheel."""

    entries: tuple[BundledEntry, ...]
    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, file: BinaryIO, entries: Sequence[BundledEntry]) -> BundleSummary:
        """Return the summary of the entries written into ``file``."""
        sha256, size_bytes = _digest_of(file)
        return cls(entries=tuple(entries), size_bytes=size_bytes, sha256=sha256)

    @property
    def content_bytes(self) -> int:
        """The unpacked size of all entries."""
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def archs(self) -> list[str]:
        """The target architectures of its kernels."""
        return sorted({entry.arch for entry in self.entries if entry.arch})

    @property
    def toolchains(self) -> list[str]:
        """The toolchains of its kernels."""
        return sorted({entry.toolchain for entry in self.entries})


def write_bundle(
    stored: Sequence[StoredEntry], file: BinaryIO, *, on_progress: OnProgress | None = None
) -> BundleSummary:
    """Write a bundle of entries into an empty, readable file.

    Raises BundleError if an entry is damaged, or all of them are gone; CacheError if other users
    can change one; OSError if the file cannot be written.
    """
    if len(stored) > MAX_ENTRIES:
        message = f"bundle: expected at most {MAX_ENTRIES} kernels, got {len(stored)}"
        raise BundleError(message, path=stored[0].layer)
    entries = []
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0) as tar:
        for entry, content in verified_entries(stored, on_progress):
            entries.append(entry)
            info = tarfile.TarInfo(entry.member)  # no owner, time 0
            info.size = len(content)
            tar.write(info.tobuf(tarfile.USTAR_FORMAT, "ascii"))
            tar.write(content)
            tar.write(bytes(-len(content) % tarfile.BLOCKSIZE))
        tar.write(bytes(2 * tarfile.BLOCKSIZE))
    return BundleSummary.of(file, entries)


def export_bundle(
    stored: Sequence[StoredEntry], target: Path, *, on_progress: OnProgress | None = None
) -> BundleSummary:
    """Write a bundle to ``target`` atomically; an existing file stays until then.

    Raises BundleError if an entry is damaged, or the file cannot be written.
    """
    with atomic_file(target) as file:
        return write_bundle(stored, file, on_progress=on_progress)


def verified_entries(
    stored: Sequence[StoredEntry], on_progress: OnProgress | None = None
) -> Iterator[tuple[BundledEntry, bytes]]:
    """Yield each entry with its verified file, in the order of their keys.

    An entry that was removed since listing is skipped. Raises BundleError if an entry is damaged,
    or all of them are gone; CacheError if other users can change one.
    """
    is_empty, done, total = True, 0, sum(one.size_bytes for one in stored)
    for one in sorted(stored, key=lambda one: (one.key, one.toolchain)):
        done += one.size_bytes
        try:
            content, manifest, _ = read_stored(one)
        except FileNotFoundError:
            continue
        except DamageError as error:
            message = f"bundle: expected a valid entry, got a damaged one: {error}: {one.path}"
            raise BundleError(message, path=one.path) from error
        is_empty = False
        yield BundledEntry.of(manifest, len(content)), content
        if on_progress is not None:
            on_progress(done, total)
    if stored and is_empty:
        path = stored[0].layer
        message = f"bundle: expected kernels, got none, all were removed: {path}"
        raise BundleError(message, path=path)


@dataclass(frozen=True, kw_only=True)
class VerifiedBundle(BundleSummary):
    """A fully verified bundle; messages refer to it by ``name``."""

    file: BinaryIO
    name: str


@contextmanager
def open_bundle(path: Path) -> Iterator[BinaryIO]:
    """Open the bundle at ``path``.

    Raises BundleError if it cannot be read, or is not a regular file.
    """
    try:
        # O_NONBLOCK: opening a FIFO must not block; it is rejected below.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        message = f"bundle: expected a file, got {error.strerror}: {path}"
        raise BundleError(message, path=path) from error
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
    """Return the entries of a seekable bundle, all of it verified; nothing is published.

    ``expect_sha256`` is the digest of the whole file, compared before anything is parsed, and
    ``max_bytes`` limits the unpacked size of the entries. Messages call the bundle ``name``. Raises
    BundleError if any check fails.
    """
    with _bundle_errors(name):
        sha256, size_bytes = _digest_of(file)
        if expect_sha256 is not None and sha256 != expect_sha256.lower():
            raise DamageError(f"expected sha256 {expect_sha256.lower()}, got {sha256}")
        entries: dict[str, BundledEntry] = {}
        content_bytes = 0
        for entry, _, _ in _members(file, size_bytes, on_progress):
            content_bytes += entry.size_bytes
            if content_bytes > max_bytes:
                raise DamageError(f"expected at most {max_bytes} bytes in total, got more")
            if len(entries) == MAX_ENTRIES:
                raise DamageError(f"expected at most {MAX_ENTRIES} kernels, got more")
            if entry.member in entries:
                raise DamageError(f"{entry.member}: expected each entry once, got a duplicate")
            entries[entry.member] = entry
    return VerifiedBundle(
        file=file, name=name, sha256=sha256, size_bytes=size_bytes, entries=(*entries.values(),)
    )


def import_bundle(
    bundle: VerifiedBundle,
    store: KernelStore,
    *,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> list[str]:
    """Publish a bundle's entries that are not in the store: ``added``, ``kept`` or ``replaced``.

    An existing entry stays, unless it is damaged. Each entry is verified again while it is read, so
    that a file that changed since publishes nothing unverified; ``dry_run`` only returns outcomes.
    Raises BundleError if the file has changed; CacheError if the store cannot be read or written.
    """
    if dry_run:
        return [_import_outcome(store, entry)[0] for entry in bundle.entries]
    outcomes: list[str] = []
    with _bundle_errors(bundle.name):
        for entry, manifest, content in _members(bundle.file, bundle.size_bytes, on_progress):
            if entry not in bundle.entries[len(outcomes) : len(outcomes) + 1]:
                raise DamageError(f"expected the bundle that was verified, got {entry.member}")
            outcome, damaged = _import_outcome(store, entry)
            if damaged is not None:
                store.remove(damaged, if_unchanged=True)
            if outcome != "kept":
                store.add(manifest, content)
            outcomes.append(outcome)
    return outcomes


@contextmanager
def atomic_file(target: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``target`` at the end; an error deletes it.

    A symbolic link stays: the file that it leads to is replaced. Raises BundleError if writing
    fails, or ``target`` is not a regular file.
    """
    with _target_errors(target):
        place = _replaceable(target)
        part = place.parent / f".mlagen.{os.getpid()}.{secrets.token_hex(4)}.part"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            # Not 0o600: a bundle is meant for sharing.
            with os.fdopen(os.open(part, flags, 0o666), "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.rename(place)
            with suppress(OSError):  # visible already; the sync guards against power failure only
                descriptor = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        finally:
            with suppress(OSError):  # already renamed on success
                part.unlink()


def require_target(target: Path) -> None:
    """Reject a target that :func:`atomic_file` cannot write, before long work.

    Raises BundleError if ``target`` is not a regular file in a writable folder.
    """
    with _target_errors(target):
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


def _members(
    file: BinaryIO, size_bytes: int, on_progress: OnProgress | None
) -> Iterator[tuple[BundledEntry, Manifest, bytes]]:
    """Yield each entry of a bundle with its file, verified.

    It replaces :class:`tarfile.TarFile`, which reads GNU and PAX extensions into memory at any
    declared size, and skips what it does not know.
    """
    file.seek(0)
    tar = gzip.GzipFile(fileobj=file, mode="rb")
    try:
        while any(block := tar.read(tarfile.BLOCKSIZE)):
            name, size = _header_of(block)
            content = tar.read(size)
            tar.read(-size % tarfile.BLOCKSIZE)
            try:
                manifest, _ = decode_all(content)
                manifest.require(name.rpartition("/")[2])
            except DamageError as error:
                raise DamageError(f"{name}: {error}") from error
            entry = BundledEntry.of(manifest, size)
            if name != entry.member:
                raise DamageError(f"expected the member {entry.member}, got {name!r}")
            yield entry, manifest, content
            if on_progress is not None:
                on_progress(min(file.tell(), size_bytes), size_bytes)
        # A tar ends with two zero blocks; some programs pad to a whole record.
        rest = tar.read(tarfile.RECORDSIZE + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DamageError(f"expected a whole gzip file, got {error}") from error
    if not block or any(rest) or len(rest) > tarfile.RECORDSIZE:
        raise DamageError("expected the end of a tar after the last member, got another")


def _header_of(block: bytes) -> tuple[str, int]:
    """Return name and size of the next member, which must be a file of an entry."""
    try:
        info = tarfile.TarInfo.frombuf(block, "ascii", "backslashreplace")
    except tarfile.TarError as error:
        raise DamageError(f"expected a member, got no tar: {error}") from error
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        kind = _KINDS.get(info.type, f"type {info.type!r}")
        raise DamageError(f"{info.name!r}: expected a regular file, got {kind}")
    if not 0 <= info.size <= ENTRY_MAX_BYTES:
        raise DamageError(
            f"{info.name!r}: expected at most {ENTRY_MAX_BYTES} bytes, got {info.size}"
        )
    return info.name, info.size


def _import_outcome(store: KernelStore, entry: BundledEntry) -> tuple[str, StoredEntry | None]:
    """Return the outcome of an import, and the damaged entry to replace."""
    for stored in store.entries(prefix=entry.key):
        if stored.toolchain == entry.toolchain:
            with suppress(FileNotFoundError):  # removed since listing
                return ("replaced", stored) if verify(stored) else ("kept", None)
    return "added", None


def _digest_of(file: BinaryIO) -> tuple[str, int]:
    """Return the SHA-256 and the size of a whole file."""
    digest, size = hashlib.sha256(), 0
    file.seek(0)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


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


@contextmanager
def _target_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except MlagenError:
        raise
    except OSError as error:
        message = f"bundle: expected a writable file, got {error.strerror or error}: {target}"
        raise BundleError(message, path=target) from error
