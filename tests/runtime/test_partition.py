"""Tests of the SM count of a context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.runtime import partition
from mlagen.runtime.device import DeviceFacts
from mlagen.runtime.partition import (
    NO_COOPERATION,
    WHOLE_GPU,
    TooManyCtasError,
    exceeds_sms,
    partition_of,
    record_rejection,
)
from tests.fixture_types import Patch

driver = pytest.importorskip("cuda.bindings.driver")

STREAM = 7
SUCCESS = driver.CUresult.CUDA_SUCCESS


class OnGpu(torch.Tensor):
    """A tensor on GPU 0."""

    def get_device(self) -> int:
        """Return the device index."""
        return 0


TENSOR = torch.zeros(1).as_subclass(OnGpu)


class Machine:
    """A GPU of 132 SMs, and the SMs of its stream's green context and of its context."""

    def __init__(self) -> None:
        self.green = 0  # none
        self.context = 132
        self.queries: list[str] = []

    def stream_green(self, stream: int) -> tuple[Any, Any]:
        """Implement cuStreamGetGreenCtx."""
        assert stream in {STREAM, 0}
        self.queries.append("green")
        return SUCCESS, 5 if self.green else 0

    def green_resource(self, green: int, kind: Any) -> tuple[Any, Any]:
        """Implement cuGreenCtxGetDevResource."""
        assert (green, kind) == (5, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
        return SUCCESS, resource(self.green)

    def context_resource(self, context: int, _: Any) -> tuple[Any, Any]:
        """Implement cuCtxGetDevResource."""
        assert context == 3
        if self.context == 0:
            return driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, None
        return SUCCESS, resource(self.context)


def resource(sms: int) -> Any:
    """Return an SM resource."""
    made = driver.CUdevResource()
    made.sm.smCount = sms
    return made


def rejection(blocks: int) -> TooManyCtasError:
    """Return the error of a launch of ``blocks`` CTAs."""
    return TooManyCtasError("", symbol="", device=0, num_ctas=blocks)


@pytest.fixture
def machine(monkeypatch: Patch) -> Machine:
    """Install a driver on which no grid has been rejected."""
    made = Machine()
    facts = DeviceFacts(index=0, name="", major=9, minor=0, sm_count=132, memory_bytes=0)
    monkeypatch.setattr(partition, "device_facts", lambda _: facts)
    monkeypatch.setattr(partition, "partitioned_gpus", set())
    monkeypatch.setattr(partition, "_rejected", set())
    monkeypatch.setattr(partition, "_whole_streams", set())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
    monkeypatch.setattr(driver, "cuStreamGetGreenCtx", made.stream_green)
    monkeypatch.setattr(driver, "cuGreenCtxGetDevResource", made.green_resource)
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (SUCCESS, 3))
    monkeypatch.setattr(driver, "cuCtxGetDevResource", made.context_resource)
    return made


def test_nothing_is_queried_before_a_grid_is_rejected(machine: Machine) -> None:
    """Tensors on the CPU never cause a query."""
    machine.green = 16
    assert partition_of(TENSOR) == WHOLE_GPU
    assert machine.queries == []
    record_rejection(rejection(132))
    machine.queries.clear()
    assert partition_of(torch.zeros(1)) == partition_of("no tensor") == WHOLE_GPU
    assert machine.queries == []


@pytest.mark.parametrize(("green", "context"), [(16, 132), (0, 16)])
def test_every_call_queries_its_context(green: int, context: int, machine: Machine) -> None:
    """The green context of the stream counts, or else the current context."""
    machine.green, machine.context = green, context
    record_rejection(rejection(132))
    inside = partition_of(TENSOR)
    machine.green, machine.context = 0, 132
    assert inside == 16
    assert partition_of(TENSOR) == WHOLE_GPU


def test_a_rejected_grid_that_should_fit_is_not_retried(machine: Machine) -> None:
    """Contexts of that size get no cooperative grid; other contexts do."""
    machine.green = 16
    record_rejection(rejection(132))
    record_rejection(rejection(16))
    assert partition_of(TENSOR) == NO_COOPERATION
    machine.green = 24
    assert partition_of(TENSOR) == 24


def test_a_stream_of_the_whole_gpu_is_queried_once(machine: Machine) -> None:
    """Stream 0, which is one of the current context, is queried at every launch that asks."""
    for stream in (STREAM, STREAM, 0, 0):
        assert not exceeds_sms(0, stream, 132)
    assert len(machine.queries) == 3
    machine.green = 16
    assert exceeds_sms(0, 0, 132)


def test_a_grid_above_the_sms_of_its_stream_is_rejected_once(machine: Machine) -> None:
    """A grid that fits is not, nor a later one, which the workspace may require."""
    machine.green = 16
    assert not exceeds_sms(0, STREAM, 16)
    assert exceeds_sms(0, STREAM, 17)
    record_rejection(rejection(17))
    assert partition_of(TENSOR) == 16
    assert not exceeds_sms(0, STREAM, 17)


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])
def test_an_old_driver_reports_no_sms(
    error: type[Exception], machine: Machine, monkeypatch: Patch
) -> None:
    """Without the query, or if it fails, no cooperative grid is launched."""
    machine.context = 0
    record_rejection(rejection(132))
    assert partition_of(TENSOR) == NO_COOPERATION

    def raise_error(_: int) -> None:
        raise error

    monkeypatch.setattr(driver, "cuStreamGetGreenCtx", raise_error)
    assert partition_of(TENSOR) == NO_COOPERATION
