"""Parallel jobs: limited by CPUs, memory and container, and at least one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlagen.prewarming.jobs import usable_jobs

CPUS = 8
GIB = 1 << 30


GROUP = "sys/fs/cgroup"


OLD_QUOTA = (f"{GROUP}/cpu/cpu.cfs_quota_us", f"{GROUP}/cpu/cpu.cfs_period_us")


@pytest.mark.parametrize(
    ("files", "jobs"),
    [
        ({}, CPUS),
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   16777216 kB\n"}, CPUS),
        ({"proc/meminfo": "MemAvailable: 1048576 kB\n"}, 4),
        ({"proc/meminfo": "MemAvailable: 1024 kB\n"}, 1),
        ({f"{GROUP}/cpu.max": "250000 100000\n"}, 3),
        ({f"{GROUP}/cpu.max": "max 100000\n"}, CPUS),
        ({f"{GROUP}/memory.max": f"{GIB}\n"}, 4),
        ({f"{GROUP}/memory.max": "max\n"}, CPUS),
        (dict(zip(OLD_QUOTA, ("200000\n", "100000\n"), strict=True)), 2),
        (dict(zip(OLD_QUOTA, ("-1\n", "100000\n"), strict=True)), CPUS),
        ({f"{GROUP}/memory/memory.limit_in_bytes": f"{GIB // 2}\n"}, 2),
        ({f"{GROUP}/memory/memory.limit_in_bytes": "9223372036854771712\n"}, CPUS),
    ],
    ids=str,
)
def test_the_tightest_limit_decides(
    files: dict[str, str], jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container of two CPUs on a machine of a hundred compiles two kernels in parallel."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CPUS)))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert usable_jobs(tmp_path) == jobs
    assert 1 <= usable_jobs() <= CPUS
