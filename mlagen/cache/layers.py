"""Where a kernel is looked for, the cache folder before the read-only ones; and why in vain."""

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

# Why there is no entry, from the usual reason to the one that tells most.
REASONS = ("absent", "other toolchain", "unreadable", "damaged")

_logger = logging.getLogger("mlagen")


@dataclass(frozen=True, kw_only=True)
class LookUp:
    """What looking for a kernel came to.

    Attributes
    ----------
    entry : CacheEntry or None
        The verified entry.
    layer : Path or None
        The root that it lies below; None where it is in memory only.
    reason : str or None
        Out of :data:`REASONS` if there is no entry.
    problem : str or None
        What is wrong with the one that would be it, in words.
    """

    entry: CacheEntry | None = None
    layer: Path | None = None
    reason: str | None = None
    problem: str | None = None


class Layers:
    """The folders in which kernels are looked for, of which the first alone is ever written."""

    def __init__(
        self, own: Layout, read_only: Sequence[Layout], packaged: Callable[[], Sequence[Path]]
    ) -> None:
        self._own = own
        self._read_only = read_only
        self._packaged = packaged
        self._warned: dict[Path, object] = {}

    def read_only(self) -> Iterator[Layout]:
        """Yield the layers that are never written; installed packages are asked last."""
        yield from self._read_only
        yield from (Layout(path, is_shared=True) for path in self._packaged())

    def look_up(self, key: CacheKey, *, is_dry: bool = False) -> LookUp:
        """Return the verified entry for ``key`` and where it lies, or why there is none.

        If ``is_dry``, nothing is moved, noted or logged.
        """
        misses = []
        for layout in chain((self._own,), self.read_only()):
            found = self._look_in(layout, key, is_dry=is_dry)
            if found.entry is not None:
                return found
            misses.append(found)
        return _most_telling(misses)

    def _look_in(self, layout: Layout, key: CacheKey, *, is_dry: bool) -> LookUp:
        misses = [LookUp(reason="absent")]
        try:
            for toolchain in _toolchains_of(layout, key):
                found = self._open(layout, layout.entry(key.digest, toolchain), is_dry=is_dry)
                if found.entry is not None:
                    return found
                misses.append(found)
            if set(_kept_toolchains(layout, key)) - {key.toolchain}:
                misses.append(LookUp(reason="other toolchain"))
        except OSError as error:  # the list of compilers cannot be read
            misses.append(self._unreadable(layout, error, is_dry=is_dry))
        return _most_telling(misses)

    def warn_once(self, layout: Layout, error: OSError) -> None:
        """Say that a layer cannot be used, once."""
        if not self._is_first(layout.root):
            return
        got = error.strerror or error
        if layout is self._own:
            message = "cache: expected a usable folder, got %s, keeping kernels in memory: %s"
            got = f"{got}{advice_for(error)}"
        else:
            message = "cache: expected a readable layer, got %s, passing it by: %s"
        _logger.warning(message, got, layout.root)

    def _open(self, layout: Layout, folder: Path, *, is_dry: bool) -> LookUp:
        """Return what lies in the folder of an entry, or why it cannot be used."""
        *above, toolchain = folder.relative_to(layout.version).parts
        seen = None
        try:
            with open_below(layout, *above) as of_key:
                if seen := of_key.identity_of(toolchain):
                    with of_key.entry(toolchain) as opened:
                        entry = read_entry(opened, key=of_key.name, toolchain=toolchain)
                        if layout is self._own and not is_dry:
                            eviction.renew(opened)
                        return LookUp(entry=entry, layer=layout.root)
        except OtherSchemaError as other:
            # The schema is part of the digest, so that no other version has entries of this key.
            # What claims so all the same is not ours: it is neither read nor removed.
            return LookUp(reason="unreadable", problem=str(other))
        except DamageError as damage:
            is_damage = _identity_now(layout, folder) == seen  # else it was only removed
            if is_damage and (is_dry or self._set_aside(layout, folder, damage, seen)):
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

    def _set_aside(
        self, layout: Layout, folder: Path, damage: DamageError, seen: Identity | None
    ) -> bool:
        """Make room for a sound entry; return False if the damaged one was gone by itself."""
        if layout is not self._own:
            if self._is_first(folder):
                _logger.warning("cache: damaged entry passed by in %s: %s", folder, damage)
            return True
        try:
            cell = quarantine.quarantine_entry(layout, folder, str(damage), seen=seen)
        except OSError as error:
            if is_gone(error) and _identity_now(layout, folder) != seen:
                return False  # somebody is clearing all of it
            if self._is_first(folder):
                message = "cache: damaged entry stays at %s, %s: %s"
                _logger.warning(message, folder, error.strerror, damage)
            return True
        if cell is not None:
            _logger.warning("cache: damaged entry moved to %s: %s", cell, damage)
        return cell is not None

    def _is_first(self, subject: Path) -> bool:
        """Whether this is the first call for a subject, of all threads and of a forked child."""
        mine = object()
        return self._warned.setdefault(subject, mine) is mine


def _most_telling(misses: Sequence[LookUp]) -> LookUp:
    return max(misses, key=lambda miss: REASONS.index(miss.reason or ""))


def _toolchains_of(layout: Layout, key: CacheKey) -> list[str]:
    """Return the compilers whose entry may serve ``key``, the newest first."""
    if key.is_exact:
        return [key.toolchain]
    found = [name for name in _kept_toolchains(layout, key) if key.accepts(name)]
    return sorted(found, key=_version, reverse=True)


def _kept_toolchains(layout: Layout, key: CacheKey) -> list[str]:
    """Return the compilers that a layer has entries of for a key."""
    try:
        with open_below(layout, *layout.of_key(key.digest).relative_to(layout.version).parts) as at:
            return sorted(filter(is_toolchain, at.names()))
    except OSError as error:
        if is_gone(error):
            return []
        raise


def _identity_now(layout: Layout, folder: Path) -> Identity | None:
    """Return what stands in the place of an entry by now, or None if nothing does."""
    *above, toolchain = folder.relative_to(layout.version).parts
    try:
        with open_below(layout, *above) as of_key:
            return of_key.identity_of(toolchain)
    except OSError:
        return None


def _version(toolchain: str) -> list[int]:
    numbers = toolchain.rpartition("-")[2].split(".")
    return [int(number) if number.isdecimal() else -1 for number in numbers]
