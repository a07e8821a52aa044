"""Removal of entries: quarantine of damaged ones, deletion, and sweeping of abandoned staging."""

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

# Enough to diagnose damage; older cells add nothing.
QUARANTINE_MAX_CELLS = 20
QUARANTINE_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Leftovers:
    """Sizes in bytes of the items in a store that are not entries."""

    quarantined: tuple[int, ...]
    abandoned: tuple[int, ...]


def quarantine_entry(
    layout: Layout, damaged: Path, reason: str, *, seen: Identity | None
) -> Path | None:
    """Move a damaged entry to the quarantine with the reason; its path is free afterwards.

    ``seen`` is the identity of the folder that was found damaged. If the path has another one now,
    another process replaced it, maybe by a valid entry: it stays, and None is returned.

    Raises
    ------
    OSError
        If it cannot be moved.
    """
    *above, toolchain = _path_parts(layout, damaged)
    if seen is None:
        return None
    try:
        with open_layout(layout) as version, version.below(*above) as folder:
            if folder.identity_of(toolchain) != seen:
                return None
            cell = _move_to_quarantine(version, folder, toolchain, reason, seen)
    except FileNotFoundError:  # moved by another process meanwhile
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
    with version.below(place.parent.name, create=True) as cells:
        try:
            with cells.make(place.name) as cell:
                cell.write("reason.json", json.dumps(report, indent=1).encode() + b"\n")
                if folder.identity_of(toolchain) == seen:  # checked again, as late as possible
                    folder.move(toolchain, cell, "entry")
                    is_moved = True
        finally:
            if not is_moved:
                cells.delete(place.name)
    return place if is_moved else None


def remove(layout: Layout, path: Path) -> None:
    """Delete ``path`` if it exists; no reader sees a part of it.

    Raises
    ------
    OSError
        If it cannot be moved to the trash.
    """
    *above, name = _path_parts(layout, path)
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
    with version.below(trash.parent.name, create=True) as staging:
        folder.move(name, staging, trash.name)
        staging.delete(trash.name)


def remove_entry(layout: Layout, path: Path) -> None:
    """Delete an entry, and the folder of its key if it was the last one."""
    remove(layout, path)
    *above, key, _ = _path_parts(layout, path)
    with suppress(OSError), open_below(layout, *above) as folder:
        folder.remove_empty(key)  # fails where other toolchains have entries


def limit_quarantine(layout: Layout) -> int:
    """Delete the oldest quarantine cells above the limits; return how many.

    Raises
    ------
    UntrustedError
        If other users can change the store.
    """
    deleted = size = 0
    try:
        with open_below(layout, layout.quarantine.name) as cells:
            names = sorted(cells.names(), key=_quarantined_at, reverse=True)
            for number, name in enumerate(names):
                size += cells.size_of(name)
                if number and (number >= QUARANTINE_MAX_CELLS or size > QUARANTINE_MAX_BYTES):
                    cells.delete(name)
                    deleted += cells.identity_of(name) is None  # it may not be deletable
    except UntrustedError:
        raise
    except OSError:
        pass  # missing or unreadable
    return deleted


def _quarantined_at(name: str) -> int:
    moment = name.split(".")[-2:][0]
    return int(moment) if moment.isdecimal() else 0


def sweep(layout: Layout) -> int:
    """Delete abandoned staging folders of dead processes; return how many.

    Raises
    ------
    OSError
        If other users can change the store, or the staging folder cannot be read.
    """
    swept = 0
    with (
        suppress(FileNotFoundError, NotADirectoryError),
        open_below(layout, layout.staging.name) as staging,
    ):
        for name in staging.names():
            with suppress(OSError):  # already removed by its owner or another sweep, or not ours
                if is_abandoned(name, staging.status_of(name).st_mtime):
                    _discard(staging, name)
                    swept += 1
    return swept


def discard_staged(layout: Layout, stem: str) -> None:
    """Delete the staging folders of a dead process, whose names begin with ``stem``."""
    with suppress(OSError), open_below(layout, layout.staging.name) as staging:
        for name in staging.names():
            if name.startswith(stem):
                staging.delete(name)


def leftovers(layout: Layout) -> Leftovers:
    """Return the sizes of quarantine cells and abandoned staging folders, as far as readable.

    Raises
    ------
    UntrustedError
        If other users can change the store.
    """
    return Leftovers(
        quarantined=_item_sizes(layout, layout.quarantine, lambda *_: True),
        abandoned=_item_sizes(layout, layout.staging, is_abandoned),
    )


def _item_sizes(
    layout: Layout, place: Path, is_counted: Callable[[str, float], bool]
) -> tuple[int, ...]:
    sizes = []
    try:
        with open_below(layout, place.name) as folder:
            for name in folder.names():
                with suppress(FileNotFoundError):  # removed meanwhile
                    if is_counted(name, folder.status_of(name).st_mtime):
                        sizes.append(folder.size_of(name))
    except UntrustedError:
        raise
    except OSError:
        pass  # missing or unreadable
    return tuple(sizes)


def _discard(staging: Folder, name: str) -> None:
    # Renamed first: its owner may be alive on a machine with a wrong clock. It then publishes all
    # of the entry or nothing, never a partly deleted one.
    if not name.startswith("trash."):
        trash = staging.layout.new_staging("trash").name
        staging.move(name, staging, trash)
        name = trash
    staging.delete(name)


def _path_parts(layout: Layout, path: Path) -> tuple[str, ...]:
    """Return the parts of a path relative to the version folder."""
    return path.relative_to(layout.version).parts
