"""Layered look-up: the writable cache folder first, then read-only layers; and miss reasons."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mlagen.cache import eviction, quarantine
from mlagen.cache.entry import CacheEntry, OtherSchemaError, read_entry
from mlagen.cache.errors import advice_for
from mlagen.cache.files import DamageError, Identity, is_gone
from mlagen.cache.folder import open_below
from mlagen.cache.key import CacheKey
from mlagen.cache.layout import Layout, is_toolchain

# Miss reasons, from the most common to the most informative.
REASONS = ("absent", "other toolchain", "unreadable", "damaged")

_logger = logging.getLogger("mlagen")


@dataclass(frozen=True, kw_only=True)
class LookUp:
    """Result of a look-up.

    Attributes
    ----------
    entry : CacheEntry or None
        The verified entry.
    layer : Path or None
        The root of its layer; None if it is in memory only.
    reason : str or None
        One of :data:`REASONS` if there is no entry.
    problem : str or None
        Description of the damage or error of the matching entry.
    """

    entry: CacheEntry | None = None
    layer: Path | None = None
    reason: str | None = None
    problem: str | None = None


class Layers:
    """The layers of a look-up; only the first is writable."""

    def __init__(
        self, own: Layout, read_only: Sequence[Layout], packaged: Callable[[], Sequence[Path]]
    ) -> None:
        self._own = own
        self._read_only = read_only
        self._packaged = packaged
        self._warned: dict[Path, object] = {}

    def read_only(self) -> Iterator[Layout]:
        """Yield the read-only layers; those of installed packages come last."""
        yield from self._read_only
        yield from (Layout(path, is_shared=True) for path in self._packaged())

    def look_up(self, key: CacheKey, *, is_dry: bool = False) -> LookUp:
        """Return the verified entry for ``key`` and its layer, or the reason of the miss.

        If ``is_dry``, nothing is moved, marked as used or logged.
        """
        misses = []
        for layout in chain((self._own,), self.read_only()):
            found = self._look_up_in(layout, key, is_dry=is_dry)
            if found.entry is not None:
                return found
            misses.append(found)
        return _strongest_miss(misses)

    def _look_up_in(self, layout: Layout, key: CacheKey, *, is_dry: bool) -> LookUp:
        misses = [LookUp(reason="absent")]
        try:
            for toolchain in _toolchains_of(layout, key):
                found = self._read(layout, layout.entry(key.digest, toolchain), is_dry=is_dry)
                if found.entry is not None:
                    return found
                misses.append(found)
            if set(_stored_toolchains(layout, key)) - {key.toolchain}:
                misses.append(LookUp(reason="other toolchain"))
        except OSError as error:  # the list of compilers cannot be read
            misses.append(self._unreadable(layout, error, is_dry=is_dry))
        return _strongest_miss(misses)

    def warn_once(self, layout: Layout, error: OSError) -> None:
        """Warn that a layer cannot be used, once."""
        if not self._is_first(layout.root):
            return
        got = error.strerror or error
        if layout is self._own:
            message = "cache: expected a usable folder, got %s, storing kernels in memory: %s"
            got = f"{got}{advice_for(error)}"
        else:
            message = "cache: expected a readable layer, got %s, ignoring it: %s"
        _logger.warning(message, got, layout.root)

    def _read(self, layout: Layout, folder: Path, *, is_dry: bool) -> LookUp:
        """Return the entry in a folder, or the reason why it cannot be used."""
        *above, toolchain = folder.relative_to(layout.version).parts
        seen = None
        try:
            with open_below(layout, *above) as key_folder:
                if seen := key_folder.identity_of(toolchain):
                    with key_folder.entry(toolchain) as opened:
                        entry = read_entry(opened, key=key_folder.name, toolchain=toolchain)
                        if layout is self._own and not is_dry:
                            eviction.mark_used(opened)
                        return LookUp(entry=entry, layer=layout.root)
        except OtherSchemaError as other:
            # The schema is part of the digest, so no other version has entries of this key.
            # One that claims to is foreign: it is neither read nor removed.
            return LookUp(reason="unreadable", problem=str(other))
        except DamageError as damage:
            is_damage = _identity_now(layout, folder) == seen  # otherwise it was removed meanwhile
            if is_damage and (is_dry or self._quarantine_damaged(layout, folder, damage, seen)):
                return LookUp(reason="damaged", problem=str(damage))
        except OSError as error:
            if not is_gone(error):
                return self._unreadable(layout, error, is_dry=is_dry)
        return LookUp(reason="absent")

    def _unreadable(self, layout: Layout, error: OSError, *, is_dry: bool) -> LookUp:
        if not is_dry:
            self.warn_once(layout, error)
        problem = f"{error.strerror or error}: {error.filename or layout.root}"
        return LookUp(reason="unreadable", problem=problem)

    def _quarantine_damaged(
        self, layout: Layout, folder: Path, damage: DamageError, seen: Identity | None
    ) -> bool:
        """Move a damaged entry away; return False if it was already gone."""
        if layout is not self._own:
            if self._is_first(folder):
                _logger.warning("cache: damaged entry ignored in %s: %s", folder, damage)
            return True
        try:
            cell = quarantine.quarantine_entry(layout, folder, str(damage), seen=seen)
        except OSError as error:
            if is_gone(error) and _identity_now(layout, folder) != seen:
                return False  # another process is clearing the cache
            if self._is_first(folder):
                message = "cache: damaged entry stays at %s, %s: %s"
                _logger.warning(message, folder, error.strerror, damage)
            return True
        if cell is not None:
            _logger.warning("cache: damaged entry moved to %s: %s", cell, damage)
        return cell is not None

    def _is_first(self, subject: Path) -> bool:
        """Whether this is the first call for a subject, across threads and in a forked child."""
        mine = object()
        return self._warned.setdefault(subject, mine) is mine


def _strongest_miss(misses: Sequence[LookUp]) -> LookUp:
    return max(misses, key=lambda miss: REASONS.index(miss.reason or ""))


def _toolchains_of(layout: Layout, key: CacheKey) -> list[str]:
    """Return the toolchains whose entry satisfies ``key``, the newest first."""
    if key.is_exact:
        return [key.toolchain]
    found = [name for name in _stored_toolchains(layout, key) if key.accepts(name)]
    return sorted(found, key=_version, reverse=True)


def _stored_toolchains(layout: Layout, key: CacheKey) -> list[str]:
    """Return the toolchains for which a layer stores an entry of a key."""
    try:
        with open_below(
            layout, *layout.key_folder(key.digest).relative_to(layout.version).parts
        ) as folder:
            return sorted(filter(is_toolchain, folder.names()))
    except OSError as error:
        if is_gone(error):
            return []
        raise


def _identity_now(layout: Layout, folder: Path) -> Identity | None:
    """Return the current identity of the folder of an entry, or None if there is none."""
    *above, toolchain = folder.relative_to(layout.version).parts
    try:
        with open_below(layout, *above) as key_folder:
            return key_folder.identity_of(toolchain)
    except OSError:
        return None


def _version(toolchain: str) -> list[int]:
    numbers = toolchain.rpartition("-")[2].split(".")
    return [int(number) if number.isdecimal() else -1 for number in numbers]
