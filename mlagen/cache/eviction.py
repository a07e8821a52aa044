"""What keeps a cache from growing without end: the least recently used entries give way.

An entry was last used when its manifest says so: the file's time of change is renewed by whoever
finds the entry, at most once an hour, since times of access are not kept on every disk.
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

_RENEWED_AFTER_S = 3600.0
_COUNTED_AFTER_S = 3600.0

# Whoever was noted to use an entry may still be reading its files until then.
YOUNG_S = 600.0

# What a damaged note can raise besides: an endless number, brackets without end.
_NO_NOTE = (OverflowError, RecursionError)

# Down to this share of the limit, so that not every publication removes something.
_KEPT_SHARE = 0.9


@dataclass(frozen=True)
class Weight:
    """What eviction knows of an entry."""

    path: Path
    size_bytes: int
    used: float  # seconds since 1970; never in the future


def renew(entry: Folder) -> None:
    """Note that an entry was used; where that cannot be noted, it is not."""
    with suppress(OSError):
        # The distance, not the age: a time in the future comes from a clock that was set back.
        if abs(time.time() - entry.status_of(MANIFEST).st_mtime) > _RENEWED_AFTER_S:
            entry.touch(MANIFEST)


def weights(layout: Layout) -> Iterator[Weight]:
    """Yield every entry with its size and its last use; reads no file, and renews future ones.

    Raises
    ------
    UntrustedError
        If others can change a folder of the store.
    """
    with (
        suppress(FileNotFoundError, NotADirectoryError),
        open_below(layout, layout.entries.name) as entries,
    ):
        for shard in _folders_in(entries):
            for key in _folders_in(shard):
                for toolchain in _names_in(key):
                    with suppress(DamageError, FileNotFoundError), key.entry(toolchain) as entry:
                        yield _weight_of(entry)


def _folders_in(folder: Folder) -> Iterator[Folder]:
    """Yield the folders in one that can be opened."""
    for name in _names_in(folder):
        try:
            inner = folder.inner(name)
        except UntrustedError:
            raise
        except OSError:
            continue
        with inner:
            yield inner


def _names_in(folder: Folder) -> list[str]:
    with suppress(OSError):
        return folder.names()
    return []


def _weight_of(entry: Folder) -> Weight:
    now, size, used = time.time(), 0, 0.0
    for name in _names_in(entry):
        with suppress(OSError):
            status = entry.status_of(name)
            size += status.st_size if stat.S_ISREG(status.st_mode) else 0
            used = status.st_mtime if name == MANIFEST else used
    if used > now:
        renew(entry)  # or a clock that was set back keeps it young for ever
    return Weight(Path(entry.path), size, min(used, now))


def evict(layout: Layout, max_bytes: int) -> list[Weight]:
    """Remove the least recently used entries until the rest fits; return what went.

    Nothing goes if everything fits. What was used a moment ago stays, even if it does not fit.

    Raises
    ------
    UntrustedError
        If others can change a folder of the store; nothing has gone then.
    """
    found = sorted(weights(layout), key=lambda weight: weight.used)
    left = sum(weight.size_bytes for weight in found)
    evicted: list[Weight] = []
    if left > max_bytes:
        young = time.time() - YOUNG_S
        for weight in found:
            if left <= max_bytes * _KEPT_SHARE or weight.used > young:
                break
            with suppress(OSError):
                remove_entry(layout, weight.path)
                left -= weight.size_bytes
                evicted.append(weight)
        count("evicted", len(evicted))
    _write_note(layout, left, time.time())
    return evicted


def limit(layout: Layout, added_bytes: int, max_bytes: int) -> list[Weight]:
    """Count an entry that was added, and evict if all of them may be too large; return what went.

    The count is a note that processes may overwrite for each other, so it is made anew from what
    lies there once an hour, and before anything is evicted.
    """
    size_bytes, counted = _read_note(layout)
    size_bytes += added_bytes
    is_counted = abs(time.time() - counted) <= _COUNTED_AFTER_S  # of no number it is not
    if not is_counted or size_bytes > max_bytes:
        return evict(layout, max_bytes)
    _write_note(layout, size_bytes, counted)
    return []


def _read_note(layout: Layout) -> tuple[int, float]:
    """Return the size that is noted, and when it was counted: long ago if there is no note."""
    with suppress(OSError, DamageError, ValueError, LookupError, TypeError, *_NO_NOTE):
        with open_layout(layout) as version:
            note = json.loads(version.read(layout.size_note.name, max_bytes=4096))
        return max(0, int(note["bytes"])), float(note["counted"])
    return 0, 0.0


def _write_note(layout: Layout, size_bytes: int, counted: float) -> None:
    note = json.dumps({"bytes": size_bytes, "counted": counted}).encode()
    staged = layout.new_staging("size")
    with (
        suppress(OSError),
        open_layout(layout) as version,
        version.below(staged.parent.name) as staging,
    ):
        try:
            staging.write(staged.name, note, waits=False)
            staging.move(staged.name, version, layout.size_note.name)
        except OSError:
            staging.remove_file(staged.name)
