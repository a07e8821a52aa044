"""Prewarming and the machine: parallel jobs, targets of the visible GPUs, and loading on them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import mlagen
from mlagen.prewarming import gpus, run
from mlagen.prewarming.jobs import usable_jobs
from mlagen.runtime.device import DeviceFacts
from mlagen.spec.kernel import KernelSpec
from tests.fixture_types import Patch

CPUS, GIB, GROUP = 8, 1 << 30, "sys/fs/cgroup"
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
    files: dict[str, str], jobs: int, tmp_path: Path, monkeypatch: Patch
) -> None:
    """A container of two CPUs on a machine of a hundred compiles two kernels in parallel."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CPUS)))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert usable_jobs(tmp_path) == jobs
    assert 1 <= usable_jobs() <= CPUS


def gpu(index: int, major: int, minor: int) -> DeviceFacts:
    """Return a GPU of that compute capability."""
    known: dict[str, Any] = {"name": "GPU", "sm_count": 132, "memory_bytes": 1 << 37}
    return DeviceFacts(index=index, major=major, minor=minor, **known)


# Two kernels that compile in 0.1 s each.
SMALL: dict[str, Any] = {"archs": "sm_80", "families": ["combine"], "dtype": "bf16"}
SMALL |= {"kv_lora_rank": [512, 256]}
NATIVE = "arch: expected a supported GPU for native, got"


@pytest.fixture
def seen(monkeypatch: Patch) -> list[DeviceFacts]:
    """Return the GPUs that the driver reports."""
    seen: list[DeviceFacts] = []
    monkeypatch.setattr(gpus, "visible_devices", lambda: seen)
    return seen


def test_native_is_the_targets_of_the_visible_gpus(seen: list[DeviceFacts]) -> None:
    """Each supported target is selected once; an unsupported GPU is skipped."""
    seen += gpu(0, 9, 0), gpu(1, 9, 0), gpu(2, 7, 5), gpu(3, 8, 0)
    report = mlagen.prewarm(families=["combine"], dry_run=True)
    archs = dict.fromkeys(str(unit.spec.arch) for unit in report.units)
    assert list(archs) == ["sm_90a", "sm_80"]


@pytest.mark.parametrize(
    ("of_machine", "options", "message"),
    [
        ((), {}, f"{NATIVE} none; name targets instead, such as sm_90a"),
        ([(7, 5)], {}, f"{NATIVE} GPU (7.5); name targets instead, such as sm_90a"),
        ([(9, 0)], {**SMALL, "load": True}, "load: expected a visible GPU for sm_80, got sm_90a"),
    ],
    ids=["no GPU", "an unsupported one", "load on another target"],
)
def test_a_target_without_a_gpu_is_rejected(
    of_machine: Any, options: Any, message: str, seen: list[DeviceFacts], cache_dir: Path
) -> None:
    """The message names the GPUs found and an explicit target, and nothing is compiled."""
    seen += (gpu(0, *capability) for capability in of_machine)
    with pytest.raises(mlagen.UnsupportedError) as raised:
        mlagen.prewarm(**options)
    assert str(raised.value) == message
    assert not cache_dir.exists()


@pytest.mark.parametrize("is_writable", [True, False])
def test_load_loads_each_kernel_on_each_gpu_of_its_target(
    is_writable: bool, seen: list[DeviceFacts], cache_dir: Path, monkeypatch: Patch
) -> None:
    """Kernels are loaded on the GPUs of their target, from memory if the cache is unwritable."""
    seen += gpu(0, 8, 0), gpu(1, 9, 0), gpu(2, 8, 0)
    loaded: list[tuple[KernelSpec, int]] = []
    monkeypatch.setattr(run, "kernel_for", lambda spec, device: loaded.append((spec, device)))
    if not is_writable:
        cache_dir.write_text("a file where the folder should be")

    report = mlagen.prewarm(**SMALL, load=True)

    assert [unit.status for unit in report.units] == ["built", "built"]
    assert loaded == [(unit.spec, device) for unit in report.units for device in (0, 2)]
    assert report.loaded == 4
