"""Layered look-up: the writable cache folder first, then read-only layers; and miss reasons."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mlagen.cache import eviction
from mlagen.cache.file import CacheEntry, DamageError, decode, entry_name
from mlagen.cache.folder import Folder, Identity, Opened, identity_of, is_entry
from mlagen.cache.key import CacheKey
from mlagen.cache.trust import advice_for, is_gone

# Miss reasons, from the most common to the most informative.
REASONS = ("absent", "other toolchain", "unreadable", "damaged")

_logger = logging.getLogger("mlagen")


@dataclass(frozen=True, kw_only=True)
class LookUp:
    """Result of a look-up."""

    entry: CacheEntry | None = None  # verified
    layer: Path | None = None  # the root of its layer; None if it is in memory only
    reason: str | None = None  # one of REASONS if there is no entry
    problem: str | None = None  # the damage or error of the matching entry


class Layers:
    """The layers of a look-up; only the first is writable."""

    def __init__(
        self, own: Folder, read_only: Sequence[Folder], packaged: Callable[[], Sequence[Path]]
    ) -> None:
        self._own = own
        self._read_only = read_only
        self._packaged = packaged
        self._installed: dict[Path, Folder] = {}
        self._warned: dict[Path, object] = {}

    def read_only(self) -> Iterator[Folder]:
        """Yield the read-only layers; those of installed packages come last."""
        yield from self._read_only
        for path in self._packaged():
            yield self._installed.setdefault(path, Folder(path, is_shared=True))

    def look_up(self, key: CacheKey, *, is_dry: bool = False) -> LookUp:
        """Return the verified entry for ``key`` and its layer, or the reason of the miss.

        If ``is_dry``, nothing is deleted, marked as used or logged.
        """
        misses = []
        for folder in chain((self._own,), self.read_only()):
            found = self._look_up_in(folder, key, is_dry=is_dry)
            if found.entry is not None:
                return found
            misses.append(found)
        return _strongest(misses)

    def warn_once(self, folder: Folder, error: OSError) -> None:
        """Log that a layer is not usable, once a process."""
        if not self._is_first(folder.root):
            return
        got = error.strerror or error
        if folder is self._own:
            message = "cache: expected a usable folder, got %s, storing kernels in memory: %s"
            got = f"{got}{advice_for(error)}"
        else:
            message = "cache: expected a readable layer, got %s, ignoring it: %s"
        _logger.warning(message, got, folder.root)

    def _look_up_in(self, folder: Folder, key: CacheKey, *, is_dry: bool) -> LookUp:
        try:
            found = self._find(folder, key, is_dry=is_dry)
            if found.reason == "absent" and folder.has_moved():
                found = self._find(folder, key, is_dry=is_dry)
        except OSError as error:
            return self._unreadable(folder, error, is_dry=is_dry)
        return found

    def _find(self, folder: Folder, key: CacheKey, *, is_dry: bool) -> LookUp:
        misses = [LookUp(reason="absent")]
        try:
            with folder.shard(key.digest) as shard:
                names = [entry_name(key.digest, key.toolchain)]
                if not key.is_exact:
                    names = [name for name in _stored(shard, key) if key.accepts(_toolchain(name))]
                    names.sort(key=_version, reverse=True)
                for name in names:
                    found = self._read(folder, shard, name, is_dry=is_dry)
                    if found.entry is not None:
                        return found
                    misses.append(found)
                if set(_stored(shard, key)) - set(names):
                    misses.append(LookUp(reason="other toolchain"))
        except OSError as error:
            if not is_gone(error):
                raise
        return _strongest(misses)

    def _read(self, folder: Folder, shard: Opened, name: str, *, is_dry: bool) -> LookUp:
        """Return the entry of a name, or the reason why it cannot be used."""
        try:
            with suppress(DamageError):
                return self._load(folder, shard, name, is_dry=is_dry)
            # What is deleted is the file that was read: the identity comes first, and a second read
            # finds what another process has put in its place.
            seen = identity_of(shard.status_of(name))
            try:
                return self._load(folder, shard, name, is_dry=is_dry)
            except DamageError as damage:
                if is_dry or self._remove(folder, shard, name, damage, seen):
                    return LookUp(reason="damaged", problem=str(damage))
        except OSError as error:
            if not is_gone(error):
                return self._unreadable(folder, error, is_dry=is_dry)
        return LookUp(reason="absent")

    def _load(self, folder: Folder, shard: Opened, name: str, *, is_dry: bool) -> LookUp:
        content, status = shard.read(name)
        manifest, cubin = decode(content)
        manifest.require(name)
        if folder is self._own and not is_dry:
            eviction.mark_used(shard, name, status)
        entry = CacheEntry(manifest, cubin, Path(f"{shard.path}/{name}"))
        return LookUp(entry=entry, layer=folder.root)

    def _unreadable(self, folder: Folder, error: OSError, *, is_dry: bool) -> LookUp:
        if not is_dry:
            self.warn_once(folder, error)
        problem = f"{error.strerror or error}: {error.filename or folder.root}"
        return LookUp(reason="unreadable", problem=problem)

    def _remove(
        self, folder: Folder, shard: Opened, name: str, damage: DamageError, seen: Identity
    ) -> bool:
        """Delete a damaged entry, where possible; return False if it was already gone."""
        path = Path(f"{shard.path}/{name}")
        if folder is not self._own:
            if self._is_first(path):
                _logger.warning("cache: damaged entry ignored in %s: %s", path, damage)
            return True
        try:
            if identity_of(shard.status_of(name)) != seen:
                return False
            shard.unlink(name)
        except OSError as error:
            if is_gone(error):
                return False
            if self._is_first(path):
                message = "cache: damaged entry stays at %s, %s: %s"
                _logger.warning(message, path, error.strerror, damage)
        else:
            _logger.warning("cache: damaged entry removed from %s: %s", path, damage)
        return True

    def _is_first(self, subject: Path) -> bool:
        """Whether this is the first call for a subject, across threads and in a forked child."""
        mine = object()
        return self._warned.setdefault(subject, mine) is mine


def _strongest(misses: Sequence[LookUp]) -> LookUp:
    return max(misses, key=lambda miss: REASONS.index(miss.reason or ""))


def _stored(shard: Opened, key: CacheKey) -> list[str]:
    """Return the names of the entries of a key, of any toolchain."""
    return [name for name in shard.names() if is_entry(name, f"{key.digest}.")]


def _toolchain(name: str) -> str:
    return name.partition(".")[2]


def _version(name: str) -> list[int]:
    numbers = name.rpartition("-")[2].split(".")
    return [int(number) if number.isdecimal() else -1 for number in numbers]
