"""What a launch passes to the driver, and the record of the launches of a thread."""

from __future__ import annotations

import ctypes
import struct
import threading
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from mlagen.errors import DriverError
from mlagen.runtime import launch as launching
from mlagen.runtime.launch import Launch, launch, record_launches
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.packing import ParameterPacking
from mlagen.runtime.partition import TooManyCtasError
from mlagen.spec.kernel import KernelSpec
from tests.fixture_types import Patch
from tests.kernels import COMBINE, SM_80, gqa_sm90, mla_sm80, mla_sm90

driver = pytest.importorskip("cuda.bindings.driver")

PDL = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
COOPERATIVE = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE


class Function(NamedTuple):
    """Stand-in for a driver function."""

    size: int  # bytes of its parameter struct


class RecordedLaunch:
    """Arguments of one launch."""

    def __init__(self, configuration: Any, function: Function, parameters: int) -> None:
        self.grid, self.block = configuration.gridDimX, configuration.blockDimX
        self.shared_bytes = configuration.sharedMemBytes
        self.stream = int(configuration.hStream)
        self.attributes = {attribute.id: attribute.value for attribute in configuration.attrs}
        self.count = configuration.numAttrs
        self.function = function
        address = ctypes.c_void_p.from_address(parameters)
        assert address.value is not None
        self.bytes = ctypes.string_at(address.value, function.size)


Launches = list[RecordedLaunch]


def kernel_of(spec: KernelSpec) -> LoadedKernel:
    """Return a kernel without loading it."""
    packing = ParameterPacking(spec)
    return LoadedKernel(spec, 0, packing, Function(packing.struct.size), "library")


def values_of(spec: KernelSpec) -> tuple[float | bytes, ...]:
    """Return one value per packed parameter of the kernel."""
    values: list[float | bytes] = []
    if any(field.code == "128s" for field in spec.parameters):
        values.append(bytes([0]) * 128 + bytes([1]) * 128 + bytes([2]) * 128)
    values += [1000 + i for i, field in enumerate(spec.parameters) if field.code == "Q"]
    named = {field.name: i for i, field in enumerate(spec.parameters) if field.is_constant}
    values.append(ParameterPacking(spec).pack_constants(named))
    floats = [field for field in spec.parameters if field.code == "f" and not field.is_constant]
    return (*values, *[0.5] * len(floats))


def launched(spec: KernelSpec, num_ctas: int = 33, *, enable_pdl: bool = True) -> Launch:
    """Launch a kernel."""
    return launch(kernel_of(spec), num_ctas, enable_pdl, values_of(spec))


@pytest.fixture
def launches(monkeypatch: Patch) -> list[RecordedLaunch]:
    """Make GPU 0 current with stream 7, and record its launches."""
    recorded: list[RecordedLaunch] = []

    def record(configuration: Any, function: Function, parameters: int, _: int) -> tuple[Any]:
        recorded.append(RecordedLaunch(configuration, function, parameters))
        return (driver.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(launching, "bind_context", lambda _: None)
    monkeypatch.setattr(launching, "_launch_kernel", lambda: record)
    return recorded


ATTRIBUTES: dict[str, tuple[KernelSpec, bool, set[Any]]] = {
    "sm90, PDL": (mla_sm90(), True, {COOPERATIVE, PDL}),
    "sm90": (mla_sm90(), False, {COOPERATIVE}),
    "PDL": (mla_sm80(), True, {PDL}),
    "plain": (mla_sm80(), False, set()),
    "sm_80": (mla_sm80(arch=SM_80), True, set()),
    "combine on sm_80": (COMBINE, True, set()),
}


@pytest.mark.parametrize(("spec", "enable_pdl", "attributes"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_a_launch_has_its_attributes_and_parameters(
    spec: KernelSpec, enable_pdl: bool, attributes: set[Any], launches: Launches
) -> None:
    """Cooperative and PDL launches have an attribute each; each field follows the previous one."""
    launched(spec, enable_pdl=enable_pdl)

    (recorded,) = launches
    sizes = (recorded.grid, recorded.block, recorded.shared_bytes)
    assert sizes == (33, spec.threads, spec.shared_bytes)
    assert (recorded.function, recorded.stream) == (Function(ParameterPacking(spec).struct.size), 7)
    assert set(recorded.attributes) == attributes
    assert recorded.count == len(attributes)
    if COOPERATIVE in attributes:
        assert recorded.attributes[COOPERATIVE].cooperative == 1
    if PDL in attributes:
        assert recorded.attributes[PDL].programmaticStreamSerializationAllowed == 1
    packing = struct.Struct("<" + "".join(field.code for field in spec.parameters))
    found = packing.unpack(recorded.bytes)  # joined values are neither longer nor shorter
    for i, (field, value) in enumerate(zip(spec.parameters, found, strict=True)):
        expected = {"128s": bytes([i % 256]) * 128, "Q": 1000 + i, "f": 0.5}.get(field.code, i)
        assert value == expected, field.name


@pytest.mark.parametrize(
    ("accepted", "error"),
    [(0, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"), (1, "CUDA_ERROR_LAUNCH_FAILED")],
    ids=["the first launch", "a replay"],
)
def test_a_rejected_launch_is_an_error(
    accepted: int, error: str, launches: Launches, monkeypatch: Patch
) -> None:
    """The message has the kernel, the grid size and the driver's error name."""
    result = driver.CUresult
    results = [(result.CUDA_SUCCESS,)] * accepted
    results.append((getattr(result, error),))
    monkeypatch.setattr(launching, "_launch_kernel", lambda: lambda *_: results.pop(0))

    with pytest.raises(DriverError) as caught:
        launched(mla_sm90(), 500, enable_pdl=False).enqueue(False)

    assert str(caught.value) == f"mla_sm90: launch of 500 CTAs failed: {error}"
    assert launches == []
    assert results == []


def test_a_driver_may_reject_two_attributes(launches: Launches, monkeypatch: Patch) -> None:
    """Later launches are then cooperative without PDL, too."""
    record = launching._launch_kernel()

    def reject_two(configuration: Any, *arguments: Any) -> tuple[Any]:
        if configuration.numAttrs > 1:
            return (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED,)
        accepted: tuple[Any] = record(configuration, *arguments)
        return accepted

    monkeypatch.setattr(launching, "_launch_kernel", lambda: reject_two)
    launched(mla_sm90()).enqueue(True)

    assert [set(recorded.attributes) for recorded in launches] == [{COOPERATIVE}] * 2
    assert [recorded.grid for recorded in launches] == [33, 33]


def test_a_replay_uses_the_current_stream(launches: Launches, monkeypatch: Patch) -> None:
    """A replay has its own kernel, grid and parameters, and the stream that is current then."""
    kernel = kernel_of(COMBINE)
    values = values_of(COMBINE)
    first = launch(kernel, 33, False, values)
    second = launch(kernel, 44, False, (*values[:-1], 0.25))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 8)

    for made in (first, second, first):
        made.enqueue(False)

    grids = [(recorded.grid, recorded.stream) for recorded in launches]
    assert grids == [(33, 7), (44, 7), (33, 8), (44, 8), (33, 8)]
    once, other = launches[0].bytes, launches[1].bytes
    assert once != other
    assert [recorded.bytes for recorded in launches[2:]] == [once, other, once]


def test_a_persistent_grid_fits_the_sms_of_each_stream(
    launches: Launches, monkeypatch: Patch
) -> None:
    """Nothing is launched on a stream with fewer SMs; the driver checks a cooperative grid."""
    streams = [7]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: streams[-1])
    asked: list[tuple[int, ...]] = []

    def exceeds(*question: int) -> bool:
        asked.append(question)
        return question[1] == 8

    monkeypatch.setattr(launching, "exceeds_sms", exceeds)
    made = launched(gqa_sm90(), 132)
    made.enqueue(True)
    streams.append(8)
    for _ in range(2):
        with pytest.raises(TooManyCtasError) as caught:
            made.enqueue(True)
        assert (caught.value.device, caught.value.num_ctas) == (0, 132)
    for spec in (mla_sm90(), mla_sm80(), COMBINE):
        launched(spec, 500)

    assert asked == [(0, 7, 132), (0, 8, 132), (0, 8, 132)]
    assert [recorded.stream for recorded in launches] == [7, 7, 8, 8, 8]


def test_each_replay_chooses_pdl(launches: Launches) -> None:
    """A replay without PDL after one with it has no stream serialization, and vice versa."""
    made = launched(mla_sm80())
    for enable_pdl in (False, True, False):
        made.enqueue(enable_pdl)
    assert [PDL in recorded.attributes for recorded in launches] == [True, False, True, False]


def test_a_launch_is_on_the_gpu_of_its_kernel(
    launches: Launches, current: list[int], monkeypatch: Patch
) -> None:
    """It makes that GPU current, takes its current stream, and switches back."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7 + index)

    launch(replace(kernel_of(COMBINE), device=1), 33, False, values_of(COMBINE))

    assert [recorded.stream for recorded in launches] == [8]
    assert current == [0, 1, 0]


def test_a_launch_can_be_replayed_by_another_thread(launches: Launches, monkeypatch: Patch) -> None:
    """The thread binds a context and has a configuration of its own."""
    bound: list[int] = []
    monkeypatch.setattr(launching, "bind_context", bound.append)
    made = launched(mla_sm80())
    made.enqueue(True)

    thread = threading.Thread(target=made.enqueue, args=(True,))
    thread.start()
    thread.join()

    assert bound == [0, 0]
    assert len({(recorded.grid, recorded.bytes) for recorded in launches}) == 1
    assert len(launches) == 3


def test_each_kernel_is_recorded_once_in_order(launches: Launches) -> None:
    """Every launch is enqueued."""
    with record_launches() as kernels:
        for spec in (mla_sm80(), COMBINE, mla_sm80()):
            launched(spec)
    launched(mla_sm80())
    assert kernels == [mla_sm80(), COMBINE]
    assert len(launches) == 4


@pytest.mark.usefixtures("launches")
def test_a_record_has_the_launches_of_its_thread_and_of_inner_records() -> None:
    """A launch of another thread is not in it, one within an inner record is in both."""
    with record_launches() as kernels:
        thread = threading.Thread(target=launched, args=(mla_sm80(),))
        thread.start()
        thread.join()
        with record_launches() as inner:
            launched(COMBINE)
        launched(COMBINE)
    assert (kernels, inner) == ([COMBINE], [COMBINE])
