"""LRU eviction: the least recently used entries are removed above the size limit.

The modification time of its manifest is the last use of an entry. A look-up that hits updates it
at most once an hour; access times are not available on every file system.
"""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlagen.cache.entry import MANIFEST
from mlagen.cache.files import DamageError
from mlagen.cache.folder import Folder, open_below, open_layout
from mlagen.cache.layout import Layout
from mlagen.cache.quarantine import remove_entry
from mlagen.cache.trust import UntrustedError
from mlagen.monitoring import count

_MARK_INTERVAL_S = 3600.0
_RECOUNT_INTERVAL_S = 3600.0

# A process that used an entry this recently may still be reading its files.
RECENT_USE_S = 600.0

# Further errors of parsing a damaged size file: an infinite number, deep nesting.
_PARSE_ERRORS = (OverflowError, RecursionError)

# Evicting down to this fraction of the limit keeps the next publications from evicting again.
_TARGET_FRACTION = 0.9


@dataclass(frozen=True)
class EntryUsage:
    """Size and last use of an entry."""

    path: Path
    size_bytes: int
    used: float  # seconds since 1970; never in the future


def mark_used(entry: Folder) -> None:
    """Update the time of last use of an entry, where possible."""
    with suppress(OSError):
        # The absolute difference: a time in the future comes from a clock that was set back.
        if abs(time.time() - entry.status_of(MANIFEST).st_mtime) > _MARK_INTERVAL_S:
            entry.touch(MANIFEST)


def entry_usages(layout: Layout) -> Iterator[EntryUsage]:
    """Yield size and last use of every entry; reads no file, and resets times in the future.

    Raises
    ------
    UntrustedError
        If other users can change a folder of the store.
    """
    with (
        suppress(FileNotFoundError, NotADirectoryError),
        open_below(layout, layout.entries.name) as entries,
    ):
        for shard in _folders_in(entries):
            for key in _folders_in(shard):
                for toolchain in _names_in(key):
                    with suppress(DamageError, FileNotFoundError), key.entry(toolchain) as entry:
                        yield _usage_of(entry)


def _folders_in(folder: Folder) -> Iterator[Folder]:
    """Yield the subfolders that can be opened."""
    for name in _names_in(folder):
        try:
            child = folder.child(name)
        except UntrustedError:
            raise
        except OSError:
            continue
        with child:
            yield child


def _names_in(folder: Folder) -> list[str]:
    with suppress(OSError):
        return folder.names()
    return []


def _usage_of(entry: Folder) -> EntryUsage:
    now, size, used = time.time(), 0, 0.0
    for name in _names_in(entry):
        with suppress(OSError):
            status = entry.status_of(name)
            size += status.st_size if stat.S_ISREG(status.st_mode) else 0
            used = status.st_mtime if name == MANIFEST else used
    if used > now:
        mark_used(entry)  # otherwise a clock that was set back protects it for ever
    return EntryUsage(Path(entry.path), size, min(used, now))


def evict(layout: Layout, max_bytes: int) -> list[EntryUsage]:
    """Remove the least recently used entries until the rest fits; return the removed ones.

    Nothing is removed if everything fits. Recently used entries stay, even above the limit.

    Raises
    ------
    UntrustedError
        If other users can change a folder of the store; nothing is removed then.
    OSError
        If entries that cannot be removed take more than the limit; the others are removed.
    """
    usages = sorted(entry_usages(layout), key=lambda usage: usage.used)
    remaining_bytes = sum(usage.size_bytes for usage in usages)
    evicted: list[EntryUsage] = []
    failure: OSError | None = None
    if remaining_bytes > max_bytes:
        recent = time.time() - RECENT_USE_S
        for usage in usages:
            if remaining_bytes <= max_bytes * _TARGET_FRACTION or usage.used > recent:
                break
            try:
                remove_entry(layout, usage.path)
            except OSError as error:
                failure = failure or error
                continue
            remaining_bytes -= usage.size_bytes
            evicted.append(usage)
        count("evicted", len(evicted))
    _write_size_file(layout, remaining_bytes, time.time())
    if failure is not None and remaining_bytes > max_bytes:
        raise failure
    return evicted


def enforce_limit(layout: Layout, added_bytes: int, max_bytes: int) -> list[EntryUsage]:
    """Add an entry to the recorded size, and evict above the limit; return the removed entries.

    Processes may overwrite the size file of each other, so the size is measured anew once an hour
    and before any eviction.
    """
    size_bytes, counted = _read_size_file(layout)
    size_bytes += added_bytes
    is_counted = abs(time.time() - counted) <= _RECOUNT_INTERVAL_S  # False for NaN
    if not is_counted or size_bytes > max_bytes:
        return evict(layout, max_bytes)
    _write_size_file(layout, size_bytes, counted)
    return []


def _read_size_file(layout: Layout) -> tuple[int, float]:
    """Return the recorded size and the time of its measurement; (0, 0) without a size file."""
    with suppress(OSError, DamageError, ValueError, LookupError, TypeError, *_PARSE_ERRORS):
        with open_layout(layout) as version:
            record = json.loads(version.read(layout.size_file.name, max_bytes=4096))
        return max(0, int(record["bytes"])), float(record["counted"])
    return 0, 0.0


def _write_size_file(layout: Layout, size_bytes: int, counted: float) -> None:
    record = json.dumps({"bytes": size_bytes, "counted": counted}).encode()
    staged = layout.new_staging("size")
    with (
        suppress(OSError),
        open_layout(layout) as version,
        version.below(staged.parent.name) as staging,
    ):
        try:
            staging.write(staged.name, record, waits=False)
            staging.move(staged.name, version, layout.size_file.name)
        except OSError:
            staging.remove_file(staged.name)
