"""LRU eviction: the least recently used entries are removed above the size limit.

The modification time of its file is the last use of an entry. A look-up that hits updates it at
most once an hour; access times are not available on every file system.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlagen.cache.file import parse_name
from mlagen.cache.folder import Folder, Opened
from mlagen.monitoring import count

_MARK_INTERVAL_S = 3600.0

# Such an entry is in use: evicting it would only have it compiled again.
RECENT_USE_S = 600.0

# Evicting down to this fraction of the limit keeps the next publications from evicting again.
_TARGET_FRACTION = 0.9

# Keys are digests, so that entries spread evenly over this number of folders.
_SHARDS = 256


@dataclass(frozen=True)
class EntryUsage:
    """Size and last use of an entry."""

    path: Path
    size_bytes: int
    used: float  # seconds since 1970; never in the future


def mark_used(shard: Opened, name: str, status: os.stat_result) -> None:
    """Update the time of last use of an entry, where possible."""
    # The absolute difference: a time in the future comes from a clock that was set back.
    if abs(time.time() - status.st_mtime) > _MARK_INTERVAL_S:
        with suppress(OSError):
            shard.touch(name)


def usages_in(shard: Opened) -> Iterator[EntryUsage]:
    """Yield size and last use of the entries in an open folder; reads no file.

    A time in the future is reset: it would protect an entry for ever.
    """
    now = time.time()
    for name in shard.names():
        if parse_name(name):
            with suppress(FileNotFoundError):
                status = shard.status_of(name)
                if status.st_mtime > now:
                    mark_used(shard, name, status)
                used = min(status.st_mtime, now)
                yield EntryUsage(Path(f"{shard.path}/{name}"), status.st_size, used)


def exceeds_share(shard: Opened, max_bytes: int) -> bool:
    """Whether an open folder has more than half of its share of the limit.

    Then all entries may be near the limit, and have to be measured; otherwise they are not.
    """
    size = sum(usage.size_bytes for usage in usages_in(shard))
    return size > max_bytes / (2 * _SHARDS)


def evict(folder: Folder, max_bytes: int) -> list[EntryUsage]:
    """Remove the least recently used entries until the rest fits; return the removed ones.

    Nothing is removed if everything fits. Recently used entries stay, even above the limit. Raises
    UntrustedError if other users can change a folder of the store; nothing is removed then; OSError
    if entries that cannot be removed take more than the limit; the others are removed.
    """
    usages = [usage for shard in folder.shards() for usage in usages_in(shard)]
    remaining_bytes = sum(usage.size_bytes for usage in usages)
    if remaining_bytes <= max_bytes:
        return []
    evicted: list[EntryUsage] = []
    failure: OSError | None = None
    recent = time.time() - RECENT_USE_S
    for usage in sorted(usages, key=lambda usage: usage.used):
        if remaining_bytes <= max_bytes * _TARGET_FRACTION or usage.used > recent:
            break
        key, _, toolchain = usage.path.name.partition(".")
        try:
            folder.remove(key, toolchain)
        except OSError as error:
            failure = failure or error
            continue
        remaining_bytes -= usage.size_bytes
        evicted.append(usage)
    count("evicted", len(evicted))
    if failure is not None and remaining_bytes > max_bytes:
        raise failure
    return evicted
