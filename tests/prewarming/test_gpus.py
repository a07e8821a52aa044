"""Prewarming with visible GPUs: their targets, and kernels loaded on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mlagen
from mlagen.prewarming import gpus, run
from mlagen.runtime.device import DeviceFacts
from mlagen.spec.kernel import KernelSpec

# Two kernels that compile in 0.1 s each.
SMALL: dict[str, Any] = {"archs": "sm_80", "families": ["combine"], "dtype": "bf16"}
SMALL |= {"kv_lora_rank": [512, 256]}


def gpu(index: int, major: int, minor: int) -> DeviceFacts:
    """Return a GPU of that compute capability."""
    return DeviceFacts(
        index=index, name="GPU", major=major, minor=minor, sm_count=132, memory_bytes=1 << 37
    )


def show_gpus(monkeypatch: pytest.MonkeyPatch, *seen: DeviceFacts) -> None:
    """Make the driver report these GPUs."""
    monkeypatch.setattr(gpus, "visible_devices", lambda: list(seen))


def test_native_is_the_targets_of_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each supported target is selected once; an unsupported GPU is skipped."""
    show_gpus(monkeypatch, gpu(0, 9, 0), gpu(1, 9, 0), gpu(2, 7, 5), gpu(3, 8, 0))

    report = mlagen.prewarm(families=["combine"], dry_run=True)

    archs = dict.fromkeys(str(unit.spec.arch) for unit in report.units)
    assert list(archs) == ["sm_90a", "sm_80"]


NATIVE = "arch: expected a supported GPU for native, got"


@pytest.mark.parametrize(
    ("seen", "options", "message"),
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
    seen: tuple[DeviceFacts, ...],
    options: dict[str, Any],
    message: str,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message names the GPUs found and an explicit target, and nothing is compiled."""
    show_gpus(monkeypatch, *seen)

    with pytest.raises(mlagen.UnsupportedError) as raised:
        mlagen.prewarm(**options)

    assert str(raised.value) == message
    assert not cache_dir.exists()


def test_load_loads_each_kernel_on_each_gpu_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are loaded on the GPUs of their target, after the build."""
    show_gpus(monkeypatch, gpu(0, 8, 0), gpu(1, 9, 0), gpu(2, 8, 0))
    loaded: list[tuple[KernelSpec, int]] = []
    monkeypatch.setattr(run, "kernel_for", lambda spec, device: loaded.append((spec, device)))

    report = mlagen.prewarm(**SMALL, load=True)

    assert loaded == [(unit.spec, device) for unit in report.units for device in (0, 2)]
    assert report.loaded == 4


def test_with_load_a_kernel_may_stay_in_memory(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an unwritable cache, prewarming still loads kernels from memory."""
    cache_dir.write_text("a file where the folder should be")
    show_gpus(monkeypatch, gpu(0, 8, 0))
    monkeypatch.setattr(run, "kernel_for", lambda spec, device: (spec, device))

    report = mlagen.prewarm(**{**SMALL, "kv_lora_rank": 512}, load=True)

    assert [unit.status for unit in report.units] == ["built"]
    assert report.loaded == 1
