"""How entries leave: into quarantine when damaged, away when asked, and swept when abandoned."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from mlagen.cache.files import Identity, is_gone
from mlagen.cache.folder import Folder, open_below, open_layout
from mlagen.cache.layout import Layout, is_abandoned
from mlagen.cache.trust import UntrustedError
from mlagen.monitoring import count

# What a look at damage needs; what is older says nothing new.
QUARANTINE_MAX_CELLS = 20
QUARANTINE_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Leftovers:
    """What lies in a store besides entries, in bytes: one number for each item."""

    quarantined: tuple[int, ...]
    abandoned: tuple[int, ...]


def quarantine_entry(
    layout: Layout, damaged: Path, reason: str, *, seen: Identity | None
) -> Path | None:
    """Move a damaged entry out of the way and say why; its place is free afterwards.

    ``seen`` is the identity of the folder that was found damaged. If another stands there by now,
    somebody else was first and may have published a good one: it stays, and None is returned.

    Raises
    ------
    OSError
        If it cannot be moved.
    """
    *above, toolchain = _names_of(layout, damaged)
    if seen is None:
        return None
    try:
        with open_layout(layout) as version, version.below(*above) as folder:
            if folder.identity_of(toolchain) != seen:
                return None
            cell = _move_to_quarantine(version, folder, toolchain, reason, seen)
    except FileNotFoundError:  # moved by somebody else meanwhile
        return None
    if cell is not None:
        count("quarantined")
        limit_quarantine(layout)
    return cell


def _move_to_quarantine(
    version: Folder, folder: Folder, toolchain: str, reason: str, seen: Identity
) -> Path | None:
    place = version.layout.new_quarantine(folder.name)
    report = {
        "key": folder.name,
        "toolchain": toolchain,
        "reason": reason,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": os.uname().nodename,
        "pid": os.getpid(),
    }
    is_moved = False
    with version.below(place.parent.name, makes=True) as cells:
        try:
            with cells.make(place.name) as cell:
                cell.write("reason.json", json.dumps(report, indent=1).encode() + b"\n")
                if folder.identity_of(toolchain) == seen:  # still, as late as possible
                    folder.move(toolchain, cell, "entry")
                    is_moved = True
        finally:
            if not is_moved:
                cells.delete(place.name)
    return place if is_moved else None


def remove(layout: Layout, path: Path) -> None:
    """Delete what stands at ``path`` if anything does; no reader ever sees half of it.

    Raises
    ------
    OSError
        If it cannot be moved out of the way.
    """
    *above, name = _names_of(layout, path)
    try:
        with open_layout(layout) as version:
            if above:
                with version.below(*above) as folder:
                    _remove(version, folder, name)
            else:
                _remove(version, version, name)
    except OSError as error:
        if not is_gone(error):
            raise


def _remove(version: Folder, folder: Folder, name: str) -> None:
    if folder.identity_of(name) is None:
        return
    trash = version.layout.new_staging("trash")
    with version.below(trash.parent.name, makes=True) as staging:
        folder.move(name, staging, trash.name)
        staging.delete(trash.name)


def remove_entry(layout: Layout, path: Path) -> None:
    """Do so with an entry, and with the folder of its key if that was the last one there."""
    remove(layout, path)
    *above, key, _ = _names_of(layout, path)
    with suppress(OSError), open_below(layout, *above) as folder:
        folder.remove_empty(key)  # fails where other toolchains have entries


def limit_quarantine(layout: Layout) -> int:
    """Delete the oldest of the quarantine above its limits; return how many cells.

    Raises
    ------
    UntrustedError
        If others can change the store.
    """
    deleted = size = 0
    try:
        with open_below(layout, layout.quarantine.name) as cells:
            names = sorted(cells.names(), key=_quarantined_at, reverse=True)
            for number, name in enumerate(names):
                size += cells.size_of(name)
                if number and (number >= QUARANTINE_MAX_CELLS or size > QUARANTINE_MAX_BYTES):
                    cells.delete(name)
                    deleted += 1
    except UntrustedError:
        raise
    except OSError:
        pass  # there is none, or it cannot be read
    return deleted


def _quarantined_at(name: str) -> int:
    moment = name.split(".")[-2:][0]
    return int(moment) if moment.isdecimal() else 0


def sweep(layout: Layout) -> int:
    """Delete what dead processes left in the staging folder; return how many folders that were.

    Raises
    ------
    OSError
        If others can change the store, or the staging folder cannot be read.
    """
    swept = 0
    with (
        suppress(FileNotFoundError, NotADirectoryError),
        open_below(layout, layout.staging.name) as staging,
    ):
        for name in staging.names():
            with suppress(OSError):  # its owner, or another sweep, was first, or it is not ours
                if is_abandoned(name, staging.status_of(name).st_mtime):
                    _take_away(staging, name)
                    swept += 1
    return swept


def discard_staged(layout: Layout, stem: str) -> None:
    """Delete what was staged under names that begin with ``stem``, by a process that is dead."""
    with suppress(OSError), open_below(layout, layout.staging.name) as staging:
        for name in staging.names():
            if name.startswith(stem):
                staging.delete(name)


def leftovers(layout: Layout) -> Leftovers:
    """Return what lies in a store besides entries, as far as it can be seen.

    Raises
    ------
    UntrustedError
        If others can change the store.
    """
    return Leftovers(
        quarantined=_sizes_in(layout, layout.quarantine, lambda *_: True),
        abandoned=_sizes_in(layout, layout.staging, is_abandoned),
    )


def _sizes_in(
    layout: Layout, place: Path, is_meant: Callable[[str, float], bool]
) -> tuple[int, ...]:
    sizes = []
    try:
        with open_below(layout, place.name) as folder:
            for name in folder.names():
                with suppress(FileNotFoundError):  # gone meanwhile
                    if is_meant(name, folder.status_of(name).st_mtime):
                        sizes.append(folder.size_of(name))
    except UntrustedError:
        raise
    except OSError:
        pass  # there is none, or it cannot be read
    return tuple(sizes)


def _take_away(staging: Folder, name: str) -> None:
    # Renamed first: its owner may be alive, after all, on a machine whose clock is wrong. It then
    # publishes all of it or nothing, but not what is left of it here.
    if not name.startswith("trash."):
        trash = staging.layout.new_staging("trash").name
        staging.move(name, staging, trash)
        name = trash
    staging.delete(name)


def _names_of(layout: Layout, path: Path) -> tuple[str, ...]:
    """Return the names that lead to a path from the folder of a layout."""
    return path.relative_to(layout.version).parts
