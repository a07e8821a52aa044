"""How entries leave: into quarantine when damaged, away when asked, and swept when abandoned."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from mlagen.cache.files import Identity, identity_of, make_folder, write_new
from mlagen.cache.layout import Layout, is_abandoned
from mlagen.cache.trust import require_trusted_folder
from mlagen.counts import count

# What a look at damage needs; what is older says nothing new.
QUARANTINE_MOST_CELLS = 20
QUARANTINE_MOST_BYTES = 64 << 20


def quarantine(layout: Layout, damaged: Path, reason: str, *, seen: Identity | None) -> Path | None:
    """Move a damaged entry out of the way and say why; its place is free afterwards.

    ``seen`` is the identity of the folder that was found damaged. If another stands there by now,
    somebody else was first and may have published a good one: it stays, and None is returned.

    Raises
    ------
    OSError
        If it cannot be moved.
    """
    if seen is None or identity_of(damaged) != seen:
        return None
    key, toolchain = damaged.parts[-2:]
    cell = layout.new_quarantine(key)
    report = {
        "key": key,
        "toolchain": toolchain,
        "reason": reason,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": os.uname().nodename,
        "pid": os.getpid(),
    }
    make_folder(cell.parent, mode=layout.folder_mode)
    require_trusted_folder(layout, cell.parent)
    cell.mkdir(mode=layout.folder_mode)
    try:
        text = json.dumps(report, indent=1).encode() + b"\n"
        write_new(cell / "reason.json", text, mode=layout.file_mode)
        if identity_of(damaged) == seen:  # still, as late as possible
            damaged.rename(cell / "entry")
        else:
            delete(cell)
            return None
    except FileNotFoundError:  # moved by somebody else since the line above
        delete(cell)
        return None
    except OSError:
        delete(cell)
        raise
    count("quarantined")
    limit_quarantine(layout)
    return cell


def remove(layout: Layout, path: Path) -> None:
    """Delete what stands at ``path`` if anything does; no reader ever sees half of it.

    Raises
    ------
    OSError
        If it cannot be moved out of the way.
    """
    if identity_of(path) is None:
        return
    trash = layout.new_staging("trash")
    make_folder(trash.parent, mode=layout.folder_mode)
    with suppress(FileNotFoundError):
        path.rename(trash)
    delete(trash)


def remove_entry(layout: Layout, path: Path) -> None:
    """Do so with an entry, and with the folder of its key if that was the last one there."""
    remove(layout, path)
    with suppress(OSError):  # other toolchains have entries there
        path.parent.rmdir()


def limit_quarantine(layout: Layout) -> int:
    """Delete the oldest of the quarantine above its limits; return how many cells."""
    try:
        cells = sorted(layout.quarantine.iterdir(), key=_quarantined_at, reverse=True)
    except OSError:
        return 0
    deleted = size = 0
    for number, cell in enumerate(cells):
        size += _size_of(cell)
        if number and (number >= QUARANTINE_MOST_CELLS or size > QUARANTINE_MOST_BYTES):
            delete(cell)
            deleted += 1
    return deleted


def _size_of(cell: Path) -> int:
    """Return the bytes of the files in a cell, as far as they can be seen."""
    size = 0
    for folder, _, files in os.walk(cell):
        for file in files:
            with suppress(OSError):  # another process limits the quarantine, too
                size += Path(folder, file).lstat().st_size
    return size


def _quarantined_at(cell: Path) -> int:
    moment = cell.name.split(".")[-2:][0]
    return int(moment) if moment.isdecimal() else 0


def sweep(layout: Layout) -> int:
    """Delete what dead processes left in the staging folder; return how many folders that were."""
    swept = 0
    with suppress(FileNotFoundError, NotADirectoryError):
        for staged in list(layout.staging.iterdir()):
            with suppress(OSError):  # its owner, or another sweep, was first, or it is not ours
                if is_abandoned(staged):
                    _take_away(layout, staged)
                    swept += 1
    return swept


def _take_away(layout: Layout, staged: Path) -> None:
    # Renamed first: its owner may be alive, after all, on a machine whose clock is wrong. It then
    # publishes all of it or nothing, but not what is left of it here.
    if not staged.name.startswith("trash."):
        staged = staged.rename(layout.new_staging("trash"))
    delete(staged)


def delete(path: Path) -> None:
    """Delete a folder, a file or a link; what cannot be deleted stays for a later sweep."""
    with suppress(OSError):  # of a stale handle it complains all the same
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # a folder that is gone, or one that holds what cannot be deleted
        path.unlink()
