"""The machine of a prewarm: targets and devices of its GPUs, and the number of parallel jobs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.runtime.device import visible_devices
from mlagen.spec.arch import Arch, arch_of_capability, parse_arch
from mlagen.spec.kernel import KernelSpec
from mlagen.values import as_str_list

# A process with NVRTC takes 170 MiB for the first kernel, and about 40 MiB for each further one
# (x86_64, NVRTC 13.5, 2026-11).
_BYTES_PER_JOB = 256 << 20

# Container limits of Linux: cgroup v2 and v1.
_GROUPS = "sys/fs/cgroup"
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


def visible_archs() -> dict[int, Arch]:
    """Return the targets of the visible GPUs by index; an unsupported GPU is skipped."""
    archs = {}
    for device in visible_devices():
        with suppress(ArgumentError):
            archs[device.index] = arch_of_capability(device.major, device.minor)
    return archs


def parse_archs(archs: str | Iterable[str]) -> list[Arch]:
    """Return the targets of these names, without duplicates; ``native`` is the visible GPUs.

    Raises ArgumentError if a name is not a target; UnsupportedError if ``native`` finds no
    supported GPU.
    """
    names = as_str_list(archs, "arch")
    found: dict[Arch, None] = {}
    for name in names:
        if name != "native":
            found[parse_arch(name)] = None
        elif native := visible_archs():
            found.update(dict.fromkeys(native.values()))
        else:
            got = ", ".join(f"{gpu.name} ({gpu.major}.{gpu.minor})" for gpu in visible_devices())
            raise UnsupportedError(
                f"arch: expected a supported GPU for native, got {got or 'none'}; "
                f"name targets instead, such as sm_90a"
            )
    return list(found)


def devices_for(specs: Sequence[KernelSpec]) -> dict[int, Arch]:
    """Return the visible GPUs that match a target of the kernels, with their targets.

    Raises UnsupportedError if there is none.
    """
    visible = visible_archs()
    archs = {spec.arch for spec in specs}
    devices = {index: arch for index, arch in visible.items() if arch in archs}
    if not devices:
        wanted = ", ".join(map(str, sorted(archs)))
        got = ", ".join(map(str, sorted(set(visible.values())))) or "none"
        raise UnsupportedError(f"load: expected a visible GPU for {wanted}, got {got}")
    return devices


def usable_jobs(root: Path = Path("/")) -> int:
    """Return one job per usable CPU, limited by memory; ``root`` is for tests."""
    free = [number for name in _LIMITS for number in _numbers(root / _GROUPS / name)]
    free += _available(root / "proc/meminfo")
    jobs = [math.ceil(_usable_cpus(root)), *(number / _BYTES_PER_JOB for number in free)]
    return max(1, int(min(jobs)))


def _usable_cpus(root: Path = Path("/")) -> float:
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
