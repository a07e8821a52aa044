"""Writing a bundle: every file is verified on its way in, and the result appears as a whole."""

from __future__ import annotations

import gzip
import os
import secrets
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mlagen.cache.bundle import (
    INDEX,
    INDEX_MOST_BYTES,
    BundledEntry,
    BundleError,
    Packed,
    bundled_manifest,
    index_to_json,
    total_bytes,
)
from mlagen.cache.bundle_members import digest_of
from mlagen.cache.catalog import StoredEntry
from mlagen.cache.entry import CUBIN, MANIFEST, Manifest, read_file, read_manifest, require_cubin
from mlagen.cache.files import DamageError, sync_folder
from mlagen.errors import MlagenError

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all


def write_bundle(
    stored: Sequence[StoredEntry], file: BinaryIO, *, on_progress: OnProgress | None = None
) -> Packed:
    """Write a bundle of entries into an empty file that can be read again.

    Raises
    ------
    BundleError
        If an entry is damaged.
    OSError
        If the file cannot be written.
    """
    announced = announce(stored)
    done, total = 0, total_bytes(announced.values())
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0) as packed:
        _write_member(packed, INDEX, _index(announced))
        for path, entry in announced.items():
            contents = read_files(path, entry)
            for member, name, _ in entry.members():
                _write_member(packed, member, contents[name])
            done += entry.size_bytes
            if on_progress is not None:
                on_progress(done, total)
        packed.write(bytes(2 * tarfile.BLOCKSIZE))
    return finished(file, announced)


def export_bundle(
    stored: Sequence[StoredEntry], target: Path, *, on_progress: OnProgress | None = None
) -> Packed:
    """Write a bundle to ``target``; until it is whole, what was there stays.

    Raises
    ------
    BundleError
        If an entry is damaged, or the file cannot be written.
    """
    with replacing(target) as file:
        return write_bundle(stored, file, on_progress=on_progress)


def announce(stored: Sequence[StoredEntry]) -> dict[Path, BundledEntry]:
    """Return what to announce of each entry, by its folder, in the order of their keys.

    Raises
    ------
    BundleError
        If a manifest is damaged.
    """
    announced = {}
    for one in sorted(stored, key=lambda one: (one.key, one.toolchain)):
        with _damages_of(one.path):
            manifest = read_manifest(one.path, key=one.key, toolchain=one.toolchain)
            entry = BundledEntry.of(manifest)
            entry.require_sound()
            bundled_manifest(manifest.to_json(), entry)
        announced[one.path] = entry
    return announced


def read_files(folder: Path, entry: BundledEntry) -> dict[str, bytes]:
    """Return every file of an announced entry, verified.

    Raises
    ------
    BundleError
        If one is not as it was announced.
    """
    with _damages_of(folder):
        manifest = read_manifest(folder, key=entry.key, toolchain=entry.toolchain)
        if BundledEntry.of(manifest) != entry:
            raise DamageError(f"{MANIFEST}: expected it unchanged, got another")
        contents = {name: _content(folder, name, manifest) for name in entry.files}
        require_cubin(contents[CUBIN])
    return contents


def finished(file: BinaryIO, announced: dict[Path, BundledEntry]) -> Packed:
    """Return what was written into ``file``."""
    sha256, size_bytes = digest_of(file)
    return Packed(entries=tuple(announced.values()), size_bytes=size_bytes, sha256=sha256)


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Give an empty file that takes the place of ``target`` at the end, or vanishes on an error.

    Raises
    ------
    BundleError
        If the disk refuses, or something else than a file is in the place.
    """
    part = target.parent / f".{target.name[:200]}.{os.getpid()}.{secrets.token_hex(4)}.part"
    try:
        _require_replaceable(target)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(part, flags, 0o666), "w+b") as file:  # made to be handed on
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.rename(target)
        with suppress(OSError):  # it is there; only a power failure could take it back
            sync_folder(target.parent)
    except MlagenError:
        raise
    except OSError as error:
        message = f"bundle: expected a writable file, got {error.strerror or error}: {target}"
        raise BundleError(message, path=target) from error
    finally:
        with suppress(OSError):  # gone, where all went well
            part.unlink()


def _require_replaceable(target: Path) -> None:
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        raise BundleError(f"bundle: expected a file, got another kind: {target}", path=target)


def _index(announced: dict[Path, BundledEntry]) -> bytes:
    index = index_to_json(announced.values())
    if len(index) > INDEX_MOST_BYTES:
        rule = f"expected a table of contents of at most {INDEX_MOST_BYTES} bytes"
        raise BundleError(
            f"bundle: {rule}, got {len(index)}; export fewer entries", path=Path(INDEX)
        )
    return index


def _content(folder: Path, name: str, manifest: Manifest) -> bytes:
    return manifest.to_json() if name == MANIFEST else read_file(folder, name, manifest)


def _write_member(packed: gzip.GzipFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)  # of nobody, from 1970
    info.size = len(content)
    packed.write(info.tobuf(tarfile.USTAR_FORMAT, "ascii"))
    packed.write(content)
    packed.write(bytes(-len(content) % tarfile.BLOCKSIZE))


@contextmanager
def _damages_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except (DamageError, OSError) as error:
        message = f"bundle: expected a sound entry, got a damaged one: {error}: {folder}"
        raise BundleError(message, path=folder) from error
