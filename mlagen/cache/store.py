"""The kernel store: find a kernel on the disk, or have it built once and publish it."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from mlagen.artifacts import Build
from mlagen.cache import catalog, disposal
from mlagen.cache.catalog import StoredEntry
from mlagen.cache.entry import CUBIN, ELF_MAGIC, CacheEntry, Manifest, read_entry
from mlagen.cache.files import DamageError, identity_of
from mlagen.cache.flight import SingleFlight
from mlagen.cache.key import CacheKey
from mlagen.cache.layout import Layout
from mlagen.cache.lock import compile_lock
from mlagen.cache.publish import publish, require_writable
from mlagen.errors import ArgumentError, CacheError

_PREFIX = re.compile(r"[0-9a-f]{6,64}")

_logger = logging.getLogger("mlagen")


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
    """

    def __init__(self, root: Path, *, lock_dir: Path, lock_timeout_s: float) -> None:
        self._layout = Layout(root)
        self._lock_dir = lock_dir
        self._lock_timeout_s = lock_timeout_s
        self._flights = SingleFlight[CacheEntry]()
        self._unpublished: dict[CacheKey, CacheEntry] = {}
        self._first_warning = threading.Lock()

    def find(self, key: CacheKey) -> CacheEntry | None:
        """Return the verified entry for ``key``, or None."""
        folder = self._layout.entry(key.digest, key.toolchain)
        try:
            if seen := identity_of(folder):
                return read_entry(folder, key=key.digest, toolchain=key.toolchain)
        except DamageError as damage:
            self._set_aside(folder, damage, seen)
        except OSError as error:
            self._warn_once(error)
        return self._unpublished.get(key)

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
        name = f"{key.digest}.{key.toolchain}"

        def find_or_build_alone() -> CacheEntry:
            lock = compile_lock(self._lock_dir / f"{name}.lock", timeout_s=self._lock_timeout_s)
            # Without publishing, a lock would make the processes compile one after the other.
            with lock if self._is_writable() else nullcontext():
                return self.find(key) or self._keep(key, build(), created_by)

        return self.find(key) or self._flights.run(name, find_or_build_alone)

    def entries(self) -> Iterator[StoredEntry]:
        """Yield every entry, damaged ones too, in the order of their keys.

        Raises
        ------
        CacheError
            If a folder cannot be read.
        """
        return catalog.stored_entries(self._layout)

    def select(self, prefix: str) -> list[StoredEntry]:
        """Return the entries whose key begins with ``prefix``.

        Raises
        ------
        ArgumentError
            If the prefix is not 6 to 64 hex digits.
        CacheError
            If a folder cannot be read.
        """
        if not _PREFIX.fullmatch(prefix):
            raise ArgumentError(f"key: expected 6 to 64 lower-case hex digits, got {prefix!r}")
        return list(catalog.stored_entries(self._layout, prefix))

    def verify(self, stored: StoredEntry) -> str | None:
        """Read every file of an entry and return what is wrong with it, or None."""
        return catalog.verify(stored)

    def quarantine(self, stored: StoredEntry, reason: str) -> Path | None:
        """Move an entry to the quarantine and return its place there, None if it was gone.

        Raises
        ------
        CacheError
            If it cannot be moved.
        """
        with _refusals(stored.path):
            seen = identity_of(stored.path)
            return disposal.quarantine(self._layout, stored.path, reason, seen=seen)

    def remove(self, stored: StoredEntry) -> None:
        """Delete an entry; whoever has read it keeps it, and its absence is no error.

        Raises
        ------
        CacheError
            If it cannot be deleted.
        """
        with _refusals(stored.path):
            disposal.remove(self._layout, stored.path)
            with suppress(OSError):  # other toolchains have entries there
                stored.path.parent.rmdir()

    def clear(self) -> int:
        """Delete every entry, the quarantine and abandoned staging; return how many entries.

        Raises
        ------
        CacheError
            If something cannot be deleted.
        """
        count = sum(1 for _ in self.entries())
        for folder in (self._layout.entries, self._layout.quarantine):
            with _refusals(folder):
                disposal.remove(self._layout, folder)
        self.sweep()
        return count

    def sweep(self) -> int:
        """Delete what dead processes left in the staging folder; return how many folders.

        Raises
        ------
        CacheError
            If the staging folder cannot be read.
        """
        with _refusals(self._layout.staging):
            return disposal.sweep(self._layout)

    def _keep(self, key: CacheKey, build: Build, created_by: str) -> CacheEntry:
        cubin = build.files[CUBIN]
        assert cubin.startswith(ELF_MAGIC), cubin[:4]
        if build.toolchain != key.toolchain:
            # The next look-up misses again, until whoever names the toolchain names this one.
            message = "toolchain: expected %s, got %s, publishing under the latter"
            _logger.warning(message, key.toolchain, build.toolchain)
        manifest = Manifest.of(key, build, created_by=created_by)
        try:
            entry = CacheEntry(manifest, cubin, publish(self._layout, manifest, build.files))
        except OSError as error:
            self._warn_once(error)
            entry = self._unpublished[key] = CacheEntry(manifest, cubin, None)
        else:
            with suppress(OSError):
                disposal.sweep(self._layout)
        return entry

    def _set_aside(self, folder: Path, damage: DamageError, seen: tuple[int, int] | None) -> None:
        try:
            if cell := disposal.quarantine(self._layout, folder, str(damage), seen=seen):
                _logger.warning("cache: damaged entry moved to %s: %s", cell, damage)
        except OSError as error:
            message = "cache: damaged entry stays at %s, %s: %s"
            _logger.warning(message, folder, error.strerror, damage)

    def _is_writable(self) -> bool:
        try:
            require_writable(self._layout)
        except OSError as error:
            self._warn_once(error)
            return False
        return True

    def _warn_once(self, error: OSError) -> None:
        # Never released: of all threads, and of a forked child too, the first one to come speaks.
        if self._first_warning.acquire(blocking=False):
            message = "cache: expected a usable folder, got %s, keeping kernels in memory: %s"
            _logger.warning(message, error.strerror or error, self._layout.root)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Turn what the disk says into a :class:`CacheError`."""
    try:
        yield
    except OSError as error:
        message = f"cache: expected a writable folder, got {error.strerror or error}: {path}"
        raise CacheError(message, path=path) from error
