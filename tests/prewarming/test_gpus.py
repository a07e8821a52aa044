"""Prewarming with visible GPUs: their targets, and kernels loaded on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mlagen
from mlagen.prewarming import gpus, run
from mlagen.runtime.device import DeviceFacts
from mlagen.spec.kernel import KernelSpec


def gpu(index: int, major: int, minor: int) -> DeviceFacts:
    """Return a GPU of that compute capability."""
    known: dict[str, Any] = {"name": "GPU", "sm_count": 132, "memory_bytes": 1 << 37}
    return DeviceFacts(index=index, major=major, minor=minor, **known)


# Two kernels that compile in 0.1 s each.
SMALL: dict[str, Any] = {"archs": "sm_80", "families": ["combine"], "dtype": "bf16"}
SMALL |= {"kv_lora_rank": [512, 256]}
NATIVE = "arch: expected a supported GPU for native, got"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[DeviceFacts]:
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
        ((gpu(0, 7, 5),), {}, f"{NATIVE} GPU (7.5); name targets instead, such as sm_90a"),
        (
            (gpu(0, 9, 0),),
            {**SMALL, "load": True},
            "load: expected a visible GPU for sm_80, got sm_90a",
        ),
    ],
    ids=["no GPU", "an unsupported one", "load on another target"],
)
def test_a_target_without_a_gpu_is_rejected(
    of_machine: Any, options: Any, message: str, seen: list[DeviceFacts], cache_dir: Path
) -> None:
    """The message names the GPUs found and an explicit target, and nothing is compiled."""
    seen += of_machine
    with pytest.raises(mlagen.UnsupportedError) as raised:
        mlagen.prewarm(**options)
    assert str(raised.value) == message
    assert not cache_dir.exists()


@pytest.mark.parametrize("is_writable", [True, False])
def test_load_loads_each_kernel_on_each_gpu_of_its_target(
    is_writable: bool, seen: list[DeviceFacts], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
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
