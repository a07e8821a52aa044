"""How often what happened to kernels in this process; what :func:`metrics` tells a monitor."""

from __future__ import annotations

import os
import threading

# One for each thing that can happen, so that a monitor sees zeros and not missing names.
_NAMES = (
    "hits",  # found in the cache folder, a read-only layer, or the memory of this process
    "hits.cache",
    "hits.layer",
    "hits.memory",
    "misses",
    "misses.absent",
    "misses.other_toolchain",
    "misses.damaged",
    "misses.unreadable",
    "compiles",
    "compiles.failed",
    "compile_ms",
    "waits",  # for another process that was compiling the same kernel
    "wait_ms",
    "lock_timeouts",
    "rejections",  # a kernel was not cached and compiling was not allowed
    "publish_failures",
    "quarantined",
    "evicted",
)

_counts = dict.fromkeys(_NAMES, 0.0)
_counting = threading.Lock()


def count(name: str, amount: float = 1.0) -> None:
    """Add to a count."""
    with _counting:
        _counts[name] += amount


def metrics() -> dict[str, int]:
    """Return how often what happened to kernels since this process began.

    A kernel that is loaded is asked for no more, so that a server that is warm changes none of
    them. Times are whole milliseconds.

    Returns
    -------
    dict[str, int]
        ``hits`` and ``misses`` with their parts (``misses.absent``, ``misses.other_toolchain``,
        ``misses.damaged``, ``misses.unreadable``), ``compiles`` and ``compile_ms``, ``waits`` for
        other processes and ``wait_ms``, ``lock_timeouts``, ``rejections``, ``publish_failures``,
        ``quarantined`` and ``evicted``.
    """
    return {name: round(_counts[name]) for name in _NAMES}


def _after_fork() -> None:
    global _counting  # noqa: PLW0603 - another thread of the parent may have held it
    _counting = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
