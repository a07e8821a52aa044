"""Number of parallel compile jobs, from CPUs, memory and container limits."""

from __future__ import annotations

import math
import os
from pathlib import Path

# A process with NVRTC takes 170 MiB for the first kernel, and about 40 MiB for each further one
# (x86_64, NVRTC 13.5, 2026-11).
_BYTES_PER_JOB = 256 << 20

# Container limits of Linux: cgroup v2 and v1.
_GROUPS = "sys/fs/cgroup"
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


def usable_jobs(root: Path = Path("/")) -> int:
    """Return one job per usable CPU, limited by memory; ``root`` is for tests."""
    free = [number for name in _LIMITS for number in _numbers(root / _GROUPS / name)]
    free += _available(root / "proc/meminfo")
    jobs = [math.ceil(usable_cpus(root)), *(number / _BYTES_PER_JOB for number in free)]
    return max(1, int(min(jobs)))


def usable_cpus(root: Path = Path("/")) -> float:
    """Return the CPUs that this process may use, a fraction if a container has a quota."""
    cpus = [float(len(os.sched_getaffinity(0)))]  # may be fewer than os.cpu_count()
    for names in _QUOTAS:
        quota = [number for name in names for number in _numbers(root / _GROUPS / name)]
        if len(quota) == 2 and min(quota) > 0:
            cpus.append(quota[0] / quota[1])
    return min(cpus)


def _numbers(path: Path) -> list[int]:
    """Return the numbers in a file; none if it is missing or has no limit (``max``)."""
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
