"""Queries of the driver, with and without GPUs, and of the capture state of their streams."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError, DriverError
from mlagen.runtime import device
from mlagen.runtime.capture import is_capturing
from mlagen.runtime.device import (
    DeviceFacts,
    arch_of_device,
    checked,
    driver_version,
    lasting_context,
    visible_devices,
)
from tests.cache.builds import ROOT
from tests.fixture_types import Patch

FACTS = "from mlagen.runtime.device import *; print(visible_devices(), driver_version())"


@pytest.mark.parametrize("is_there", [False, True], ids=["no driver", "a failing driver"])
def test_without_a_working_driver_there_are_no_gpus(is_there: bool, monkeypatch: Patch) -> None:
    """The list of GPUs is empty and the version None; no error is raised."""
    driver = pytest.importorskip("cuda.bindings.driver")

    def init(_: int) -> tuple[object]:
        if is_there:
            return (driver.CUresult.CUDA_ERROR_NO_DEVICE,)
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(driver, "cuInit", init)
    assert visible_devices() == []
    assert driver_version() is None


def test_without_the_bindings_there_are_no_gpus(tmp_path: Path) -> None:
    """Cache commands need no cuda-python."""
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/__init__.py").write_text("raise ImportError\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", FACTS], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[] None\n"


H200 = DeviceFacts(
    index=0, name="NVIDIA H200", major=9, minor=0, sm_count=132, memory_bytes=150_000_000_000
)


class FakeDriver(SimpleNamespace):
    """A driver with one GPU; every call succeeds."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=132,
    )

    def __getattr__(self, symbol: str) -> Any:
        values: dict[str, tuple[object, ...]] = {
            "cuDeviceGetCount": (0, 1),
            "cuDeviceGet": (0, 0),
            "cuDeviceGetName": (0, b"NVIDIA H200\0\0\0"),
            "cuDeviceTotalMem": (0, 150_000_000_000),
            "cuDriverGetVersion": (0, 13020),
        }
        if symbol == "cuDeviceGetAttribute":
            return lambda attribute, _: (0, attribute)  # the numbers above are the values
        return lambda *_: values[symbol]


def test_device_facts_of_a_gpu(monkeypatch: Patch) -> None:
    """Name, capability, SMs and memory of each GPU, and the newest supported CUDA, are reported."""
    monkeypatch.setattr(device, "_initialized_driver", FakeDriver)

    assert visible_devices() == [H200]
    assert driver_version() == "13.2"


def test_the_arch_of_a_gpu(monkeypatch: Patch) -> None:
    """The compute capability selects the target; a GPU without a target is rejected."""
    t4 = replace(H200, index=1, major=7, minor=5)
    monkeypatch.setattr(device, "device_facts", [H200, t4].__getitem__)
    assert str(arch_of_device.__wrapped__(0)) == "sm_90a"
    with pytest.raises(ArgumentError, match=r"^device: expected compute capability .*, got 7\.5$"):
        arch_of_device.__wrapped__(1)


def test_a_failed_call_names_the_symbol_and_the_driver_error(monkeypatch: Patch) -> None:
    """The error has the symbol, and the message has the driver's text for the status."""
    driver = pytest.importorskip("cuda.bindings.driver")
    words = (driver.CUresult.CUDA_SUCCESS, b"device kernel image is invalid")
    monkeypatch.setattr(driver, "cuGetErrorString", lambda _: words)
    with pytest.raises(DriverError) as caught:
        checked((driver.CUresult.CUDA_ERROR_INVALID_IMAGE,), "cuLibraryLoadData")
    assert caught.value.symbol == "cuLibraryLoadData"
    assert str(caught.value) == (
        "cuLibraryLoadData: device kernel image is invalid (CUDA_ERROR_INVALID_IMAGE)"
    )


@pytest.mark.parametrize("green", [0, 5], ids=["in another context", "in a green context"])
def test_loading_bypasses_a_green_context(green: int, monkeypatch: Patch) -> None:
    """The primary context is current during the load, and popped even if it fails."""
    driver = pytest.importorskip("cuda.bindings.driver")
    current = ["a context"]

    def push(context: str) -> tuple[int]:
        current.append(context)
        return (0,)

    answers: dict[str, Any] = {
        "cuCtxGetCurrent": lambda: (0, 3),
        "cuStreamGetGreenCtx": lambda _: (0, green),
        "cuDeviceGet": lambda index: (0, index),
        "cuDevicePrimaryCtxRetain": lambda index: (0, f"primary of {index}"),
        "cuCtxPushCurrent": push,
        "cuCtxPopCurrent": lambda: (0, current.pop()),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(driver, name, answer)

    inside = []

    def load() -> None:
        with lasting_context(2):
            inside.append(current[-1])
            raise KeyError

    with pytest.raises(KeyError):
        load()

    assert inside == ["primary of 2" if green else "a context"]
    assert current == ["a context"]


@pytest.mark.parametrize("kind", [int, lambda index: torch.device("cuda", index)])
def test_each_gpu_has_a_current_stream(
    kind: type[int], current: list[int], monkeypatch: Patch
) -> None:
    """The query switches to the given GPU and back; a CPU never captures."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == 1)

    assert is_capturing(kind(1))
    assert not is_capturing(kind(0))
    assert not is_capturing(torch.device("cpu"))
    assert current == [0, 1, 0]
