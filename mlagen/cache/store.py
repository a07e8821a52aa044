"""Kernel store: look up a kernel on the disk, or build it once and publish it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from mlagen.artifacts import Build
from mlagen.cache import catalog, eviction, quarantine
from mlagen.cache.catalog import StoredEntry
from mlagen.cache.entry import CUBIN, ELF_MAGIC, CacheEntry, Manifest
from mlagen.cache.errors import raising_cache_errors
from mlagen.cache.key import CacheKey
from mlagen.cache.layers import Layers, LookUp
from mlagen.cache.layout import Layout
from mlagen.cache.lock import compile_lock
from mlagen.cache.publish import publish, require_writable
from mlagen.cache.single_flight import SingleFlight
from mlagen.errors import ArgumentError
from mlagen.fork_safety import defer_exit
from mlagen.monitoring import count

_PREFIX = re.compile(r"[0-9a-f]{6,64}")

_logger = logging.getLogger("mlagen")


@dataclass(frozen=True)
class Collected:
    """Items that :meth:`KernelStore.collect` deleted."""

    staging: int  # folders
    quarantined: int  # cells
    evicted: tuple[eviction.EntryUsage, ...]


class KernelStore:
    """The kernel cache below ``root``, shared by all processes that use the same folder.

    Constructing a store does not touch the disk. Reading takes no lock and creates nothing; a
    damaged entry is quarantined. All methods are thread-safe and fork-safe.

    Parameters
    ----------
    root : Path
        The cache folder.
    lock_dir : Path
        A local folder for the locks that avoid duplicate compiles.
    lock_timeout_s : float
        Maximum wait for another process that compiles the same kernel.
    layers : Sequence[Path]
        Read-only cache folders that look-ups search after ``root``, in this order.
    packaged : Callable[[], Sequence[Path]]
        Finds the layers of installed packages, trusted like their code; called if all others miss.
    is_shared : bool
        Whether folders that other users can write are trusted.
    max_bytes : int or None
        Size limit of the entries below ``root``; None or 0 is no limit.
    """

    def __init__(
        self,
        root: Path,
        *,
        lock_dir: Path,
        lock_timeout_s: float,
        layers: Sequence[Path] = (),
        packaged: Callable[[], Sequence[Path]] = tuple,
        is_shared: bool = False,
        max_bytes: int | None = None,
    ) -> None:
        self._layout = Layout(root, is_shared)
        read_only = [Layout(layer, is_shared) for layer in layers]
        self._layers = Layers(self._layout, read_only, packaged)
        self._lock_dir = lock_dir
        self._lock_timeout_s = lock_timeout_s
        self._max_bytes = max_bytes
        self._flights = SingleFlight[CacheEntry]()
        self._unpublished: dict[CacheKey, CacheEntry] = {}

    @property
    def root(self) -> Path:
        """The cache folder."""
        return self._layout.root

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
        store warns once and keeps its builds in memory.

        Parameters
        ----------
        key : CacheKey
            The kernel to look up.
        build : Callable[[], Build]
            Compiles it; its exception reaches every waiting caller, and nothing is cached.
        created_by : str
            ``jit`` or ``prewarm``, for the manifest.

        Returns
        -------
        CacheEntry
            The verified entry; its ``path`` is None if it could not be published.
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

    def add(self, manifest: Manifest, files: Mapping[str, bytes]) -> Path:
        """Publish an entry from a bundle, and return its folder.

        An existing entry stays.

        Raises
        ------
        CacheError
            If it cannot be published.
        """
        with raising_cache_errors(self._layout.root):
            path = publish(self._layout, manifest, files)
        self._clean_up(sum(map(len, files.values())))
        return path

    def entries(self, *, layers: bool = False, prefix: str = "") -> Iterator[StoredEntry]:
        """Yield every entry, including damaged ones, in the order of their keys.

        Parameters
        ----------
        layers : bool
            Whether to yield the entries of the read-only layers afterwards.
        prefix : str
            Prefix of their keys.

        Raises
        ------
        CacheError
            If a folder cannot be read.
        """
        yield from catalog.stored_entries(self._layout, prefix)
        for layout in self._layers.read_only() if layers else ():
            yield from catalog.stored_entries(layout, prefix, is_read_only=True)

    def select(self, prefix: str) -> list[StoredEntry]:
        """Return the entries of all layers whose key begins with ``prefix``.

        Raises
        ------
        ArgumentError
            If the prefix is not 6 to 64 hex digits.
        CacheError
            If a folder cannot be read.
        """
        if not _PREFIX.fullmatch(prefix):
            raise ArgumentError(f"key: expected 6 to 64 lower-case hex digits, got {prefix!r}")
        return list(self.entries(layers=True, prefix=prefix))

    def verify(self, stored: StoredEntry) -> str | None:
        """Call :func:`mlagen.cache.catalog.verify`."""
        return catalog.verify(stored)

    def quarantine(self, stored: StoredEntry, reason: str) -> Path | None:
        """Move a listed entry to the quarantine; return its new path, or None if it is gone.

        Raises
        ------
        CacheError
            If it cannot be moved.
        """
        with raising_cache_errors(stored.path):
            return quarantine.quarantine_entry(
                self._layout, stored.path, reason, seen=stored.identity
            )

    def remove(self, stored: StoredEntry) -> None:
        """Delete an entry; loaded kernels stay valid, and a missing entry is no error.

        Raises
        ------
        CacheError
            If it cannot be deleted.
        """
        with raising_cache_errors(stored.path):
            quarantine.remove_entry(self._layout, stored.path)

    def clear(self) -> int:
        """Delete all entries, the quarantine and abandoned staging; return the number of entries.

        Raises
        ------
        CacheError
            If something cannot be deleted.
        """
        removed = sum(1 for _ in self.entries())
        for place in (self._layout.entries, self._layout.quarantine, self._layout.size_file):
            with raising_cache_errors(place):
                quarantine.remove(self._layout, place)
        self.sweep()
        return removed

    def collect(self) -> Collected:
        """Collect garbage: abandoned staging, old quarantine cells, entries above the size limit.

        Raises
        ------
        CacheError
            If the staging folder cannot be read, or other users can change a folder.
        """
        with raising_cache_errors(self._layout.root):
            for _ in eviction.entry_usages(self._layout):  # checks trust before anything is deleted
                pass
            evicted = eviction.evict(self._layout, self._max_bytes) if self._max_bytes else []
            quarantined = quarantine.limit_quarantine(self._layout)
        return Collected(self.sweep(), quarantined, tuple(evicted))

    def sweep(self) -> int:
        """Delete abandoned staging folders of dead processes; return how many.

        Raises
        ------
        CacheError
            If the staging folder cannot be read.
        """
        with raising_cache_errors(self._layout.staging):
            return quarantine.sweep(self._layout)

    def _publish(self, key: CacheKey, build: Build, created_by: str, because: str) -> CacheEntry:
        cubin = build.files[CUBIN]
        assert cubin.startswith(ELF_MAGIC), cubin[:4]
        if not key.accepts(build.toolchain):
            # The next look-up misses again; the compile stage has warned.
            message = "toolchain: expected %s, got %s, publishing under the latter"
            _logger.info(message, key.toolchain, build.toolchain)
        manifest = Manifest.of(key, build, created_by=created_by, because=because)
        path = None
        try:
            path = publish(self._layout, manifest, build.files)
            self._clean_up(sum(map(len, build.files.values())))
        except OSError as error:
            count("publish_failures")
            self._layers.warn_once(self._layout, error)
        if because in {"damaged", "unreadable"} and self._layers.look_up(key).entry is None:
            path = None  # the unusable entry could not be moved, and still occupies the path
        entry = CacheEntry(manifest, cubin, path)
        if path is None:
            self._unpublished[key] = entry
        return entry

    def _clean_up(self, added_bytes: int) -> None:
        """Sweep staging and enforce the size limit after a publication."""
        with suppress(OSError):
            quarantine.sweep(self._layout)
            if self._max_bytes:
                eviction.enforce_limit(self._layout, added_bytes, self._max_bytes)

    def _is_writable(self) -> bool:
        try:
            require_writable(self._layout)
        except OSError as error:
            self._layers.warn_once(self._layout, error)
            return False
        return True
