"""Kernel store: look up a kernel on the disk, or build it once and publish it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from mlagen.artifacts import Build
from mlagen.cache import eviction
from mlagen.cache.file import (
    CUBIN,
    CacheEntry,
    DamageError,
    Manifest,
    decode_all,
    decode_manifest,
    encode,
    parse_name,
)
from mlagen.cache.folder import VERSION, Folder, Identity, Opened, identity_of, is_entry
from mlagen.cache.key import CacheKey
from mlagen.cache.layers import Layers, LookUp
from mlagen.cache.lock import SingleFlight, compile_lock
from mlagen.cache.trust import UntrustedError, is_gone, raising_cache_errors
from mlagen.errors import ArgumentError, CacheError
from mlagen.fork_safety import defer_exit, defer_forks
from mlagen.monitoring import count
from mlagen.paths import folder_problem
from mlagen.settings import Settings, current_settings

# Entry-point group of packages that ship kernels; each entry point names such a package.
ENTRY_POINT_GROUP = "mlagen.kernels"

_PREFIX = re.compile(r"[0-9a-f]{6,64}")

_logger = logging.getLogger("mlagen")

_stores: dict[Settings, KernelStore] = {}


class UnreadableError(CacheError):
    """An entry that this process cannot read, which is no proof of damage."""


@dataclass(frozen=True)
class StoredEntry:
    """One entry on the disk: valid, damaged or unreadable.

    ``problem`` is the reason why there is no ``manifest``; ``is_damaged`` is False if this process
    may not read it. A manifest that is set is verified; only :func:`read_stored` checks the cubin
    and the other files.
    """

    path: Path
    key: str
    toolchain: str
    manifest: Manifest | None
    problem: str | None
    is_damaged: bool
    size_bytes: int
    used: float  # last use, in seconds since 1970; 0 if unknown
    folder: Folder  # that contains it
    is_read_only: bool
    identity: Identity  # of its file at the time of listing

    @property
    def layer(self) -> Path:
        """The root of the folder that contains it."""
        return self.folder.root


@dataclass(frozen=True)
class Collected:
    """What :meth:`KernelStore.collect` deleted."""

    abandoned: int  # temporary files
    evicted: tuple[eviction.EntryUsage, ...]


class KernelStore:
    """The kernel cache below ``root``, shared by all processes that use the same folder.

    Constructing a store does not touch the disk. Reading takes no lock and creates nothing; a
    damaged entry is deleted. All methods are thread-safe and fork-safe. Look-ups search ``root``,
    then the read-only ``layers``, then those that ``packaged`` finds.
    """

    def __init__(
        self,
        root: Path,
        *,
        lock_dir: Path,  # on this machine, to avoid duplicate compiles
        lock_timeout_s: float,
        layers: Sequence[Path] = (),
        packaged: Callable[[], Sequence[Path]] = tuple,  # trusted like code; if all others miss
        is_shared: bool = False,  # folders that other users can write are trusted
        max_bytes: int | None = None,  # of the entries below ``root``
    ) -> None:
        self._folder = Folder(root, is_shared=is_shared)
        read_only = [Folder(layer, is_shared=is_shared) for layer in layers]
        self._layers = Layers(self._folder, read_only, packaged)
        self._lock_dir = lock_dir
        self._lock_timeout_s = lock_timeout_s
        self._max_bytes = max_bytes
        self._flights = SingleFlight[CacheEntry]()
        self._unpublished: dict[CacheKey, CacheEntry] = {}

    @property
    def root(self) -> Path:
        """The cache folder."""
        return self._folder.root

    def find(self, key: CacheKey) -> CacheEntry | None:
        """Return the verified entry for ``key``, or None."""
        return self.look_up(key).entry

    def look_up(self, key: CacheKey, *, is_dry: bool = False) -> LookUp:
        """Return the verified entry for ``key`` and its layer, or the reason of the miss.

        If ``is_dry``, a damaged entry stays in place, and the entry is not marked as used.
        """
        found = self._layers.look_up(key, is_dry=is_dry)
        if found.entry is None and (entry := self._unpublished.get(key)):
            return LookUp(entry=entry)
        return found

    def find_or_build(
        self, key: CacheKey, build: Callable[[], Build], *, created_by: str = "jit"
    ) -> CacheEntry:
        """Return the entry for ``key``; of concurrent callers on this machine, one runs ``build``.

        The builder gets its own bytes, published or not. If the cache folder cannot be written, the
        store warns once and keeps its builds in memory, as entries without a path. An exception of
        ``build`` reaches every waiting caller, and nothing is cached.
        """
        found = self.look_up(key)
        return found.entry or self.build(
            key, build, created_by=created_by, because=found.reason or "absent"
        )

    def build(
        self, key: CacheKey, build: Callable[[], Build], *, created_by: str, because: str
    ) -> CacheEntry:
        """Do the same after a look-up that missed for the reason ``because``."""
        name = f"{key.digest}.{key.toolchain}"

        def find_or_build_alone() -> CacheEntry:
            lock = compile_lock(self._lock_dir / f"{name}.lock", timeout_s=self._lock_timeout_s)
            # Without publishing, a lock would only serialize the compiles of the processes.
            with lock if self._is_writable() else nullcontext():
                if entry := self.look_up(key).entry:
                    return entry
                with defer_exit():
                    return self._publish(key, build(), created_by, because)

        return self._flights.run(name, find_or_build_alone)

    def add(self, manifest: Manifest, content: bytes) -> None:
        """Publish the verified file of an entry from a bundle; an existing entry stays.

        Raises CacheError if it cannot be published.
        """
        with raising_cache_errors(self.root):
            key, toolchain = manifest.key, manifest.toolchain
            self._folder.publish(key, toolchain, content, then=self._clean_up)

    def require_writable(self) -> None:
        """Raise :class:`CacheError` if publishing cannot succeed."""
        with raising_cache_errors(self.root, suggests_folder=True):
            self._folder.require_writable()

    def entries(self, *, layers: bool = False, prefix: str = "") -> Iterator[StoredEntry]:
        """Yield every entry, damaged ones too, by key; with ``layers`` then those of the others.

        Raises CacheError if a folder cannot be read, or other users can change it.
        """
        yield from stored_entries(self._folder, prefix)
        for folder in self._layers.read_only() if layers else ():
            yield from stored_entries(folder, prefix, is_read_only=True)

    def select(self, prefix: str) -> list[StoredEntry]:
        """Return the entries of all layers whose key begins with ``prefix``.

        Raises ArgumentError if the prefix is not 6 to 64 hex digits; CacheError if a folder cannot
        be read.
        """
        if not _PREFIX.fullmatch(prefix):
            raise ArgumentError(f"key: expected 6 to 64 lower-case hex digits, got {prefix!r}")
        return list(self.entries(layers=True, prefix=prefix))

    def remove(self, stored: StoredEntry, *, if_unchanged: bool = False) -> bool:
        """Delete an entry; loaded kernels stay valid. Return False if it is gone.

        With ``if_unchanged``, an entry that was replaced after it was listed stays too. Raises
        CacheError if it cannot be deleted.
        """
        seen = stored.identity if if_unchanged else None
        with raising_cache_errors(stored.path):
            return self._folder.remove(stored.key, stored.toolchain, seen=seen)

    def clear(self) -> int:
        """Delete all entries and abandoned files; return the number of entries.

        Raises CacheError if something cannot be deleted; everything else is.
        """
        with raising_cache_errors(self.root):  # trust is checked before anything is deleted
            names = [name for shard in self._folder.shards() for name in shard.names()]
        found = list(filter(None, map(parse_name, names)))
        failures = [error for each in found if (error := self._failure_to_remove(*each))]
        self.sweep()
        if failures:
            raise failures[0]
        return len(found)

    def collect(self) -> Collected:
        """Delete abandoned files, and entries above the size limit.

        Raises CacheError if other users can change a folder, or too little can be deleted.
        """
        with raising_cache_errors(self.root):
            evicted = eviction.evict(self._folder, self._max_bytes) if self._max_bytes else []
        return Collected(len(self.sweep()), tuple(evicted))

    def sweep(self, *, dry_run: bool = False) -> list[int]:
        """Delete the temporary files of dead processes; return their sizes.

        Raises CacheError if a folder cannot be read.
        """
        with raising_cache_errors(self.root):
            return [
                size for shard in self._folder.shards() for size in shard.sweep(dry_run=dry_run)
            ]

    def remove_old_layouts(self, *, dry_run: bool = False) -> int:
        """Delete what earlier versions of mlagen stored in layouts of their own; return the bytes.

        Raises CacheError if it cannot be deleted.
        """
        with raising_cache_errors(self.root):
            return self._folder.remove_old_layouts(dry_run=dry_run)

    def _failure_to_remove(self, key: str, toolchain: str) -> CacheError | None:
        try:
            with raising_cache_errors(self._folder.path_of(key, toolchain)):
                self._folder.remove(key, toolchain)
        except CacheError as error:
            return error
        return None

    def _publish(self, key: CacheKey, build: Build, created_by: str, because: str) -> CacheEntry:
        if not key.accepts(build.toolchain):
            # The next look-up misses again; the compile stage has warned.
            message = "toolchain: expected %s, got %s, publishing under the latter"
            _logger.info(message, key.toolchain, build.toolchain)
        manifest, content = encode(key, build, created_by=created_by, because=because)
        path: Path | None = self._folder.path_of(manifest.key, manifest.toolchain)
        try:
            is_first = self._folder.publish(
                manifest.key, manifest.toolchain, content, then=self._clean_up
            )
        except OSError as error:
            count("publish_failures")
            self._layers.warn_once(self._folder, error)
            path = None
        else:
            if not is_first and because in {"damaged", "unreadable"} and not self.find(key):
                path = None  # the unusable entry could not be deleted, and still has the name
        entry = CacheEntry(manifest, build.files[CUBIN], path)
        if path is None:
            self._unpublished[key] = entry
        return entry

    def _clean_up(self, shard: Opened) -> None:
        """Sweep the folder of a publication, and enforce the size limit."""
        with suppress(OSError):
            shard.sweep()
            if self._max_bytes and eviction.exceeds_share(shard, self._max_bytes):
                eviction.evict(self._folder, self._max_bytes)

    def _is_writable(self) -> bool:
        try:
            self._folder.require_writable()
        except OSError as error:
            self._layers.warn_once(self._folder, error)
            return False
        return True


def stored_entries(
    folder: Folder, prefix: str = "", *, is_read_only: bool = False
) -> Iterator[StoredEntry]:
    """Yield the entries of one folder, as :meth:`KernelStore.entries` does."""
    try:
        for shard in folder.shards(prefix):
            for name in shard.names():
                if is_entry(name, prefix):
                    with suppress(FileNotFoundError):
                        yield _stored_entry(folder, shard, name, is_read_only=is_read_only)
    except OSError as error:
        # The error of trust names its own path.
        path = folder.root if isinstance(error, UntrustedError) else error.filename or folder.root
        with raising_cache_errors(Path(path), expected="readable"):
            raise


def read_stored(stored: StoredEntry) -> tuple[bytes, Manifest, dict[str, bytes]]:
    """Return the file, the manifest and the contents of an entry, all verified.

    Raises FileNotFoundError if it is gone; DamageError if it is damaged; UnreadableError if this
    process cannot read it; CacheError if other users can change it.
    """
    try:
        with stored.folder.shard(stored.key) as shard:
            content, _ = shard.read(stored.path.name)
    except UntrustedError:
        with raising_cache_errors(stored.path):
            raise
    except OSError as error:
        if is_gone(error):
            raise FileNotFoundError(error.errno, error.strerror, str(stored.path)) from error
        message = f"cache: {_unreadable_text(error)}: {error.filename or stored.path}"
        raise UnreadableError(message, path=stored.path) from error
    manifest, files = decode_all(content)
    manifest.require(stored.path.name)
    return content, manifest, files


def verify(stored: StoredEntry) -> str | None:
    """Check every file of an entry and return the problem, or None.

    Raises what :func:`read_stored` does.
    """
    try:
        read_stored(stored)
    except DamageError as error:
        return str(error)
    return None


def _stored_entry(folder: Folder, shard: Opened, name: str, *, is_read_only: bool) -> StoredEntry:
    manifest: Manifest | None = None
    problem, is_damaged = None, False
    try:
        start, status = shard.read(name, start_only=True)
        manifest, _ = decode_manifest(start, status.st_size)
        manifest.require(name)
    except (UntrustedError, FileNotFoundError):
        raise
    except (DamageError, OSError) as error:
        is_damaged, manifest = isinstance(error, DamageError), None
        problem = _unreadable_text(error) if isinstance(error, OSError) else str(error)
        status = shard.status_of(name)
    key, _, toolchain = name.partition(".")
    return StoredEntry(
        path=Path(f"{shard.path}/{name}"),
        key=key,
        toolchain=toolchain,
        manifest=manifest,
        problem=problem,
        is_damaged=is_damaged,
        size_bytes=status.st_size,
        used=min(status.st_mtime, time.time()),
        folder=folder,
        is_read_only=is_read_only,
        identity=identity_of(status),
    )


def _unreadable_text(error: OSError) -> str:
    return f"expected a readable entry, got {error.strerror or error}"


def kernel_store() -> KernelStore:
    """Return the store of the current settings; creates nothing on disk."""
    settings = current_settings()
    # `setdefault`: concurrent first callers get the same store, and share its single flight.
    return _stores.get(settings) or _stores.setdefault(settings, _store_of(settings))


@cache
def packaged_layers() -> Sequence[Path]:
    """Return the cache folders of installed packages without importing them."""
    layers = []
    try:
        with defer_forks():  # importlib.metadata imports lazily
            points = sorted(metadata.entry_points(group=ENTRY_POINT_GROUP))
        for point in points:
            files = point.dist.files if point.dist else ()
            place = (point.value, VERSION)
            first = next((file for file in files or () if file.parts[:2] == place), None)
            if first is not None:
                layers.append(Path(str(first.locate())).parents[len(first.parts) - 2])
    except (LookupError, OSError, TypeError, ValueError) as error:
        # All packages are read together, so any of them may have broken metadata.
        message = "%s: expected readable metadata of all packages, got %r, ignoring their kernels"
        _logger.warning(message, ENTRY_POINT_GROUP, error)
    return _usable_layers(ENTRY_POINT_GROUP, layers)


def _usable_layers(name: str, layers: Sequence[Path]) -> tuple[Path, ...]:
    """Return the usable layers, and warn of each other one.

    A missing layer may appear later. One that fails is dropped instead of retried for each kernel,
    since an unreachable server may take long to fail.
    """
    problems = {layer: folder_problem(layer) for layer in layers}
    for layer, problem in problems.items():
        if problem:
            _logger.warning("%s: expected a folder, got %s, ignoring it: %s", name, problem, layer)
    return tuple(layer for layer, problem in problems.items() if problem in (None, "none"))


def _store_of(settings: Settings) -> KernelStore:
    return KernelStore(
        settings.cache_dir,
        lock_dir=settings.lock_dir,
        lock_timeout_s=settings.lock_timeout_s,
        layers=_usable_layers("MLAGEN_CACHE_RO", settings.cache_layers),
        packaged=packaged_layers,
        is_shared=settings.trusts_shared,
        max_bytes=settings.cache_max_bytes,
    )
