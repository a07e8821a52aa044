"""The kernel store: find a kernel on the disk, or have it built once and publish it."""

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
from mlagen.cache.errors import rejections
from mlagen.cache.key import CacheKey
from mlagen.cache.layers import Layers, LookUp
from mlagen.cache.layout import Layout
from mlagen.cache.lock import compile_lock
from mlagen.cache.publish import publish, require_writable
from mlagen.cache.single_flight import SingleFlight
from mlagen.errors import ArgumentError
from mlagen.fork_safety import finished_before_exit
from mlagen.monitoring import count

_PREFIX = re.compile(r"[0-9a-f]{6,64}")

_logger = logging.getLogger("mlagen")


@dataclass(frozen=True)
class Collected:
    """What :meth:`KernelStore.collect` deleted."""

    staging: int  # folders
    quarantined: int  # cells
    evicted: tuple[eviction.Weight, ...]


class KernelStore:
    """The folder of kernels below ``root``, shared with every process that names the same one.

    Making a store touches nothing. Reading takes no lock and creates nothing; a damaged entry is
    moved aside. All methods may be called from any thread, and after a fork.

    Parameters
    ----------
    root : Path
        The cache folder.
    lock_dir : Path
        A folder of this machine for the locks that save a second compile.
    lock_timeout_s : float
        How long to wait for another process that compiles the same kernel.
    layers : Sequence[Path]
        Cache folders that are looked in after ``root``, in this order, and never written.
    packaged : Callable[[], Sequence[Path]]
        Finds more of them, in installed packages: trusted as their code is, and asked for only
        where the others have nothing.
    is_shared : bool
        Whether folders that others may write in are trusted.
    max_bytes : int or None
        What the entries below ``root`` may take together; None or 0 is no limit.
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
        """Return the verified entry for ``key`` and where it lies, or why there is none.

        If ``is_dry``, a damaged entry stays where it is, and no use is noted.
        """
        found = self._layers.look_up(key, is_dry=is_dry)
        if found.entry is None and (entry := self._unpublished.get(key)):
            return LookUp(entry=entry)
        return found

    def find_or_build(
        self, key: CacheKey, build: Callable[[], Build], *, created_by: str = "jit"
    ) -> CacheEntry:
        """Return the entry for ``key``; however many ask, on this machine one runs ``build``.

        The builder gets the bytes it built, published or not. Where the cache folder cannot be
        written, the store warns once and keeps what it builds in memory.

        Parameters
        ----------
        key : CacheKey
            What to look for.
        build : Callable[[], Build]
            Makes it; whatever it raises reaches every caller that waits, and nothing is kept.
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
        """Do the same for a kernel that was looked for in vain, ``because`` says why."""
        name = f"{key.digest}.{key.toolchain}"

        def find_or_build_alone() -> CacheEntry:
            lock = compile_lock(self._lock_dir / f"{name}.lock", timeout_s=self._lock_timeout_s)
            # Without publishing, a lock would make the processes compile one after the other.
            with lock if self._is_writable() else nullcontext():
                if entry := self.look_up(key).entry:
                    return entry
                with finished_before_exit():
                    return self._keep(key, build(), created_by, because)

        return self._flights.run(name, find_or_build_alone)

    def add(self, manifest: Manifest, files: Mapping[str, bytes]) -> Path:
        """Publish an entry that was made elsewhere, and return its folder.

        If there is one already, that one stays.

        Raises
        ------
        CacheError
            If it cannot be published.
        """
        with rejections(self._layout.root):
            path = publish(self._layout, manifest, files)
        self._tidy(sum(map(len, files.values())))
        return path

    def entries(self, *, layers: bool = False, prefix: str = "") -> Iterator[StoredEntry]:
        """Yield every entry, damaged ones too, in the order of their keys.

        Parameters
        ----------
        layers : bool
            Whether to yield those of the read-only layers after them.
        prefix : str
            What their keys begin with.

        Raises
        ------
        CacheError
            If a folder cannot be read.
        """
        yield from catalog.stored_entries(self._layout, prefix)
        for layout in self._layers.read_only() if layers else ():
            yield from catalog.stored_entries(layout, prefix, is_read_only=True)

    def select(self, prefix: str) -> list[StoredEntry]:
        """Return the entries whose key begins with ``prefix``, those of all layers.

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
        """Do what :func:`mlagen.cache.catalog.verify` does."""
        return catalog.verify(stored)

    def quarantine(self, stored: StoredEntry, reason: str) -> Path | None:
        """Move an entry as it was listed to the quarantine; return its place, None if it is gone.

        Raises
        ------
        CacheError
            If it cannot be moved.
        """
        with rejections(stored.path):
            return quarantine.quarantine_entry(
                self._layout, stored.path, reason, seen=stored.identity
            )

    def remove(self, stored: StoredEntry) -> None:
        """Delete an entry; whoever has read it keeps it, and its absence is no error.

        Raises
        ------
        CacheError
            If it cannot be deleted.
        """
        with rejections(stored.path):
            quarantine.remove_entry(self._layout, stored.path)

    def clear(self) -> int:
        """Delete every entry, the quarantine and abandoned staging; return how many entries.

        Raises
        ------
        CacheError
            If something cannot be deleted.
        """
        removed = sum(1 for _ in self.entries())
        for place in (self._layout.entries, self._layout.quarantine, self._layout.size_note):
            with rejections(place):
                quarantine.remove(self._layout, place)
        self.sweep()
        return removed

    def collect(self) -> Collected:
        """Delete what nobody needs: abandoned staging, old quarantine, entries above the limit.

        Raises
        ------
        CacheError
            If the staging folder cannot be read, or others can change a folder.
        """
        with rejections(self._layout.root):
            for _ in eviction.weights(self._layout):  # before anything goes, all is looked at
                pass
            evicted = eviction.evict(self._layout, self._max_bytes) if self._max_bytes else []
            quarantined = quarantine.limit_quarantine(self._layout)
        return Collected(self.sweep(), quarantined, tuple(evicted))

    def sweep(self) -> int:
        """Delete what dead processes left in the staging folder; return how many folders.

        Raises
        ------
        CacheError
            If the staging folder cannot be read.
        """
        with rejections(self._layout.staging):
            return quarantine.sweep(self._layout)

    def _keep(self, key: CacheKey, build: Build, created_by: str, because: str) -> CacheEntry:
        cubin = build.files[CUBIN]
        assert cubin.startswith(ELF_MAGIC), cubin[:4]
        if not key.accepts(build.toolchain):
            # The next look-up misses again; the compiler has warned of it.
            message = "toolchain: expected %s, got %s, publishing under the latter"
            _logger.info(message, key.toolchain, build.toolchain)
        manifest = Manifest.of(key, build, created_by=created_by, because=because)
        path = None
        try:
            path = publish(self._layout, manifest, build.files)
            self._tidy(sum(map(len, build.files.values())))
        except OSError as error:
            count("publish_failures")
            self._layers.warn_once(self._layout, error)
        if because in {"damaged", "unreadable"} and self._layers.look_up(key).entry is None:
            path = None  # what cannot be used could not be moved, either
        entry = CacheEntry(manifest, cubin, path)
        if path is None:
            self._unpublished[key] = entry
        return entry

    def _tidy(self, added_bytes: int) -> None:
        """Do what has to be done now and then, after something was published."""
        with suppress(OSError):
            quarantine.sweep(self._layout)
            if self._max_bytes:
                eviction.limit(self._layout, added_bytes, self._max_bytes)

    def _is_writable(self) -> bool:
        try:
            require_writable(self._layout)
        except OSError as error:
            self._layers.warn_once(self._layout, error)
            return False
        return True
