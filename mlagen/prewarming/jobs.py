"""How many kernels this machine compiles at once: what CPUs, memory and container allow."""

from __future__ import annotations

import math
import os
from pathlib import Path

# Of a process with NVRTC: 170 MiB for its first kernel, and some 40 for each beside it
# (x86_64, NVRTC 13.5, 2026-11).
_BYTES_OF_ONE = 256 << 20

# Where Linux tells the limits of a container, in its second and in its first version.
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


def usable_jobs(root: Path = Path("/")) -> int:
    """Return one job for each usable CPU, as far as memory goes; ``root`` is for tests."""
    groups = root / "sys/fs/cgroup"
    jobs = [float(len(os.sched_getaffinity(0)))]  # may be fewer than os.cpu_count()
    for names in _QUOTAS:
        quota = [number for name in names for number in _numbers(groups / name)]
        if len(quota) == 2 and min(quota) > 0:
            jobs.append(math.ceil(quota[0] / quota[1]))
    free = [number for name in _LIMITS for number in _numbers(groups / name)]
    free += _available(root / "proc/meminfo")
    jobs += [number / _BYTES_OF_ONE for number in free]
    return max(1, int(min(jobs)))


def _numbers(path: Path) -> list[int]:
    """Return the numbers in a file; none where there is no file, or it says that all is free."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def _available(meminfo: Path) -> list[int]:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
