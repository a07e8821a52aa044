"""What loading a kernel asks of the driver, and what it has ready for its calls."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from mlagen.runtime import loader
from mlagen.runtime.loader import load
from mlagen.spec.kernel import KernelSpec, packing_of
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
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Let every driver call succeed with its own name, and note it and what is reserved."""
    seen: list[tuple[Any, ...]] = []

    def answer(name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            seen.append((name, *arguments))
            succeeded = driver.CUresult.CUDA_SUCCESS
            return (succeeded,) if name.startswith("cuFunc") else (succeeded, name)

        return call

    for name in CALLS:
        monkeypatch.setattr(driver, name, answer(name))
    monkeypatch.setattr(loader, "lasting_context", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(
        loader, "reserve_semaphores", lambda device: seen.append(("reserve", device))
    )
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return seen


@pytest.mark.parametrize("spec", [mla_sm90(), mla_sm80(), COMBINE], ids=lambda s: s.family)
def test_a_kernel_is_loaded_whole(spec: KernelSpec, asked: list[tuple[Any, ...]]) -> None:
    """Its symbol is found, its shared memory allowed, its code brought to the device."""
    kernel = load(b"code", spec, 3)

    assert (kernel.spec, kernel.device) == (spec, 3)
    assert kernel.packing.format == packing_of(spec).format
    assert (kernel.library, kernel.function) == ("cuLibraryLoadData", "cuKernelGetFunction")
    assert asked[0][:2] == ("cuLibraryLoadData", b"code")
    assert asked[1] == ("cuLibraryGetKernel", "cuLibraryLoadData", spec.symbol.encode())
    attributes = [call[-1] for call in asked if call[0] == "cuFuncSetAttribute"]
    assert attributes == ([spec.shared_bytes] if spec.shared_bytes else [])
    assert ("cuFuncLoad", "cuKernelGetFunction") in asked


def test_counters_are_ready_before_a_call_needs_them(asked: list[tuple[Any, ...]]) -> None:
    """Of kernels whose blocks wait for each other: their first call may be in a CUDA graph."""
    load(b"code", mla_sm80(), 3)
    assert ("reserve", 3) not in asked

    load(b"code", mla_sm90(), 3)

    assert asked[-1] == ("reserve", 3)
