"""Metrics of kernel look-ups and compilations in this process."""

from __future__ import annotations

import os
import threading

# Every metric exists from the start, so that a monitor reads zeros instead of missing names.
_NAMES = (
    "hits",  # in the cache folder, a read-only layer, or this process's memory
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
    "waits",  # for another process that compiles the same kernel
    "wait_ms",
    "lock_timeouts",
    "rejections",  # a kernel is not cached and this process may not compile
    "publish_failures",
    "evicted",
)

_counts = dict.fromkeys(_NAMES, 0.0)
_counting = threading.Lock()


def count(name: str, amount: float = 1.0) -> None:
    """Add ``amount`` to a metric."""
    with _counting:
        _counts[name] += amount


def metrics() -> dict[str, int]:
    """Return the metrics of kernel look-ups and compilations since the process started.

    Calls with a loaded kernel do no look-up, so a warm server changes none of them. Times are whole
    milliseconds.

    Returns
    -------
    dict[str, int]
        ``hits`` with its parts (``hits.cache``, ``hits.layer``, ``hits.memory``), ``misses`` with
        its parts (``misses.absent``, ``misses.other_toolchain``, ``misses.damaged``,
        ``misses.unreadable``), ``compiles``, ``compiles.failed`` and ``compile_ms``, ``waits`` for
        other processes and ``wait_ms``, ``lock_timeouts``, ``rejections``, ``publish_failures``
        and ``evicted``.
    """
    return {name: round(_counts[name]) for name in _NAMES}


def _after_fork() -> None:
    global _counting  # noqa: PLW0603 - another thread of the parent may have held it
    _counting = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
