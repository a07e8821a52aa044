"""Tests of the loader's driver calls and reserved semaphores."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from mlagen import engine
from mlagen.cache.store import kernel_store
from mlagen.engine import kernel_for
from mlagen.errors import CaptureError
from mlagen.runtime import loader
from mlagen.runtime.loader import LoadedKernel, load
from mlagen.runtime.packing import ParameterPacking
from mlagen.spec.kernel import KernelSpec
from tests.fixture_types import Patch
from tests.kernels import COMBINE, mla_sm80, mla_sm90

driver = pytest.importorskip("cuda.bindings.driver")

CALLS = (
    "cuLibraryLoadData",
    "cuLibraryGetKernel",
    "cuKernelGetFunction",
    "cuFuncSetAttribute",
    "cuFuncLoad",
)


@pytest.fixture
def calls(monkeypatch: Patch) -> list[tuple[Any, ...]]:
    """Let every driver call succeed and return its name; record calls and reservations."""
    recorded: list[tuple[Any, ...]] = []

    def answer(name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            recorded.append((name, *arguments))
            success = driver.CUresult.CUDA_SUCCESS
            return (success,) if name.startswith("cuFunc") else (success, name)

        return call

    for name in CALLS:
        monkeypatch.setattr(driver, name, answer(name))
    monkeypatch.setattr(loader, "lasting_context", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(
        loader, "reserve_semaphores", lambda device: recorded.append(("reserve", device))
    )
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return recorded


@pytest.mark.parametrize("spec", [mla_sm90(), mla_sm80(), COMBINE], ids=lambda s: s.family)
def test_a_kernel_is_loaded_eagerly(spec: KernelSpec, calls: list[tuple[Any, ...]]) -> None:
    """The loader finds the symbol, raises the shared-memory limit and loads the code."""
    kernel = load(b"code", spec, 3)
    assert (kernel.spec, kernel.device) == (spec, 3)
    assert kernel.packing.struct.format == ParameterPacking(spec).struct.format
    assert (kernel.library, kernel.function) == ("cuLibraryLoadData", "cuKernelGetFunction")
    assert calls[0][:2] == ("cuLibraryLoadData", b"code")
    assert calls[1] == ("cuLibraryGetKernel", "cuLibraryLoadData", spec.symbol.encode())
    attributes = [call[-1] for call in calls if call[0] == "cuFuncSetAttribute"]
    assert attributes == ([spec.shared_bytes] if spec.shared_bytes else [])
    assert ("cuFuncLoad", "cuKernelGetFunction") in calls


def test_loading_reserves_semaphores(calls: list[tuple[Any, ...]]) -> None:
    """Kernels with semaphores reserve them, since their first call may be in a CUDA graph."""
    load(b"code", mla_sm80(), 3)
    assert ("reserve", 3) not in calls
    load(b"code", mla_sm90(), 3)
    assert calls[-1] == ("reserve", 3)


def test_a_captured_call_loads_and_compiles_nothing(monkeypatch: Patch) -> None:
    """A kernel that is not loaded yet is rejected before it is built; a loaded one is returned."""
    loaded = LoadedKernel.__new__(LoadedKernel)
    monkeypatch.setattr(engine, "_loaded", {(COMBINE, 0): loaded})
    monkeypatch.setattr(loader, "load", lambda *_: loaded)
    monkeypatch.setattr(loader, "is_capturing", lambda _: True)
    with pytest.raises(CaptureError, match="not loaded, and nothing can be loaded while"):
        kernel_for(COMBINE, 1)
    assert list(kernel_store().entries()) == []
    assert kernel_for(COMBINE, 0) is loaded
