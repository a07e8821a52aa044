"""How many SMs a context has, as the driver tells of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.runtime import partition
from mlagen.runtime.device import DeviceFacts
from mlagen.runtime.partition import (
    NO_COOPERATION,
    WHOLE_GPU,
    TooManyBlocksError,
    note_rejection,
    partition_of,
)

driver = pytest.importorskip("cuda.bindings.driver")

STREAM = 7
SUCCESS = driver.CUresult.CUDA_SUCCESS


class OnGpu(torch.Tensor):
    """A tensor that says it is on the first GPU."""

    def get_device(self) -> int:
        """Return its index."""
        return 0


TENSOR = torch.zeros(1).as_subclass(OnGpu)


class Machine:
    """A GPU of 132 SMs, and the SMs of the green context and of the context of its stream."""

    def __init__(self) -> None:
        self.green = 0  # none
        self.context = 132
        self.queries: list[str] = []

    def stream_green(self, stream: int) -> tuple[Any, Any]:
        """Answer for cuStreamGetGreenCtx."""
        assert stream == STREAM
        self.queries.append("green")
        return SUCCESS, 5 if self.green else 0

    def green_resource(self, green: int, kind: Any) -> tuple[Any, Any]:
        """Answer for cuGreenCtxGetDevResource."""
        assert (green, kind) == (5, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
        return SUCCESS, resource(self.green)

    def context_resource(self, context: int, _: Any) -> tuple[Any, Any]:
        """Answer for cuCtxGetDevResource."""
        assert context == 3
        if self.context == 0:
            return driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, None
        return SUCCESS, resource(self.context)


def resource(sms: int) -> Any:
    """Return what the driver tells of some SMs."""
    made = driver.CUdevResource()
    made.sm.smCount = sms
    return made


def rejection(blocks: int) -> TooManyBlocksError:
    """Return what a launch of so many blocks raises."""
    return TooManyBlocksError("", symbol="", device=0, blocks=blocks)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Let the driver be that of a machine on which nothing was rejected."""
    made = Machine()
    facts = DeviceFacts(index=0, name="", major=9, minor=0, sm_count=132, memory_bytes=0)
    monkeypatch.setattr(partition, "device_facts", lambda _: facts)
    monkeypatch.setattr(partition, "_partitioned", set())
    monkeypatch.setattr(partition, "_rejected", set())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
    monkeypatch.setattr(driver, "cuStreamGetGreenCtx", made.stream_green)
    monkeypatch.setattr(driver, "cuGreenCtxGetDevResource", made.green_resource)
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (SUCCESS, 3))
    monkeypatch.setattr(driver, "cuCtxGetDevResource", made.context_resource)
    return made


def test_nothing_is_queried_before_a_grid_is_rejected(machine: Machine) -> None:
    """And of tensors on the CPU nothing ever is."""
    machine.green = 16

    assert partition_of(TENSOR) == WHOLE_GPU
    assert machine.queries == []
    note_rejection(rejection(132))
    machine.queries.clear()
    assert partition_of(torch.zeros(1)) == partition_of("no tensor") == WHOLE_GPU
    assert machine.queries == []


@pytest.mark.parametrize(("green", "context"), [(16, 132), (0, 16)])
def test_a_context_is_looked_at_anew_at_every_call(
    green: int, context: int, machine: Machine
) -> None:
    """A green context that the stream has, or the current one."""
    machine.green, machine.context = green, context
    note_rejection(rejection(132))

    inside = partition_of(TENSOR)
    machine.green, machine.context = 0, 132

    assert inside == 16
    assert partition_of(TENSOR) == WHOLE_GPU


def test_a_grid_that_should_fit_is_not_tried_again(machine: Machine) -> None:
    """There blocks may not wait for each other; elsewhere they may."""
    machine.green = 16
    note_rejection(rejection(132))
    note_rejection(rejection(16))

    assert partition_of(TENSOR) == NO_COOPERATION
    machine.green = 24
    assert partition_of(TENSOR) == 24


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])
def test_an_old_driver_tells_nothing(
    error: type[Exception], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the query, as where it fails, no grid is taken for one that fits."""
    machine.context = 0
    note_rejection(rejection(132))
    assert partition_of(TENSOR) == NO_COOPERATION

    def raise_error(_: int) -> None:
        raise error

    monkeypatch.setattr(driver, "cuStreamGetGreenCtx", raise_error)
    assert partition_of(TENSOR) == NO_COOPERATION
