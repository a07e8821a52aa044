"""How entries leave: into quarantine when damaged, away when asked, and swept when abandoned."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from mlagen.cache.files import identity_of, make_folder, write_new
from mlagen.cache.layout import Layout, is_abandoned


def quarantine(
    layout: Layout, damaged: Path, reason: str, *, seen: tuple[int, int] | None
) -> Path | None:
    """Move a damaged entry out of the way and say why; its place is free afterwards.

    ``seen`` is the identity of the folder that was found damaged. If another stands there by now,
    somebody else was first and may have published a good one: it stays, and None is returned.

    Raises
    ------
    OSError
        If it cannot be moved.
    """
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
    make_folder(cell.parent)
    cell.mkdir(mode=0o700)
    try:
        write_new(cell / "reason.json", json.dumps(report, indent=1).encode() + b"\n")
        if seen is not None and identity_of(damaged) == seen:
            damaged.rename(cell / "entry")
            return cell
    except FileNotFoundError:
        pass  # moved by somebody else since the line above
    except OSError:
        shutil.rmtree(cell, ignore_errors=True)
        raise
    shutil.rmtree(cell, ignore_errors=True)
    return None


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
    make_folder(trash.parent)
    with suppress(FileNotFoundError):
        path.rename(trash)
    delete(trash)


def sweep(layout: Layout) -> int:
    """Delete what dead processes left in the staging folder; return how many folders that were."""
    swept = 0
    with suppress(FileNotFoundError, NotADirectoryError):
        for staged in list(layout.staging.iterdir()):
            with suppress(FileNotFoundError):  # its owner, or another sweep, was first
                if is_abandoned(staged):
                    delete(staged)
                    swept += 1
    return swept


def delete(path: Path) -> None:
    """Delete a folder, a file or a link; what cannot be deleted stays for a later sweep."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # a folder that is gone, or one that holds what cannot be deleted
        path.unlink()
