"""Tests of the semaphores of a workspace."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from mlagen.errors import CaptureError
from mlagen.runtime import semaphores
from mlagen.runtime.device import DeviceFacts
from mlagen.runtime.semaphores import new_schedule_id, reserve_semaphores, semaphores_of
from mlagen.spec.mla.sm90 import semaphore_region_bytes
from tests.fixture_types import Patch

WORKSPACE = 1 << 44


@pytest.fixture
def slabs(monkeypatch: Patch) -> list[int]:
    """Let two GPUs, of 132 and 78 SMs, use CPU memory; record the device of each slab."""
    made: list[int] = []

    facts = DeviceFacts(index=0, name="", major=9, minor=0, sm_count=132, memory_bytes=0)
    gpus = [facts, replace(facts, index=1, sm_count=78)]

    def zeros(size: int, device: int) -> torch.Tensor:
        made.append(device)
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(semaphores, "device_facts", gpus.__getitem__)
    monkeypatch.setattr(semaphores, "_zeros", zeros)
    monkeypatch.setattr(semaphores, "is_capturing", lambda _: False)
    for name, empty in (("_regions", {}), ("_free", {}), ("_slabs", [])):
        monkeypatch.setattr(semaphores, name, empty)
    return made


def capture(monkeypatch: Patch) -> None:
    """Make every stream capturing."""
    monkeypatch.setattr(semaphores, "is_capturing", lambda _: True)


@pytest.mark.usefixtures("slabs")
def test_a_workspace_keeps_its_semaphores() -> None:
    """CUDA graphs hold the address, so every call returns the same one."""
    first = semaphores_of(0, WORKSPACE, 0)
    semaphores_of(0, WORKSPACE + 1, 0)
    assert semaphores_of(0, WORKSPACE, 0) == first


@pytest.mark.usefixtures("slabs")
def test_schedules_that_alternate_have_separate_metadata() -> None:
    """A workspace has a region for each of four schedules in a row, and no more."""
    found = [semaphores_of(0, WORKSPACE, schedule_id) for schedule_id in range(7, 15)]
    assert len(set(found)) == 4
    assert found[4:] == found[:4]
    assert semaphores_of(0, WORKSPACE, 0) == semaphores_of(0, WORKSPACE, 8)


@pytest.mark.parametrize(("device", "sm_count"), [(0, 132), (1, 78)])
@pytest.mark.usefixtures("slabs")
def test_workspaces_share_no_semaphore(device: int, sm_count: int) -> None:
    """Each has zeroed memory for a semaphore and the scheduler metadata of every SM."""
    addresses = [
        semaphores_of(device, WORKSPACE + index, 0) for index in range(semaphores._REGIONS)
    ]
    (slab,) = semaphores._slabs
    ordered = sorted(addresses)
    steps = {later - earlier for earlier, later in pairwise(ordered)}
    assert min(steps) >= semaphore_region_bytes(sm_count)
    assert ordered[0] == slab.data_ptr()
    assert ordered[-1] + semaphore_region_bytes(sm_count) <= slab.data_ptr() + slab.numel()
    assert all((address - ordered[0]) % 128 == 0 for address in addresses)
    assert not slab.any()


def test_gpus_have_separate_semaphores(slabs: list[int]) -> None:
    """The same workspace address on another GPU has semaphores of its own."""
    first, second = semaphores_of(0, WORKSPACE, 0), semaphores_of(1, WORKSPACE, 0)
    assert first != second
    assert slabs == [0, 1]


def test_a_call_in_a_capture_allocates_nothing(slabs: list[int], monkeypatch: Patch) -> None:
    """The semaphores reserved by loading a kernel suffice for many new workspaces."""
    reserve_semaphores(0)
    capture(monkeypatch)
    found = {semaphores_of(0, WORKSPACE + index, 0) for index in range(semaphores._REGIONS)}
    assert len(found) == semaphores._REGIONS
    assert slabs == [0]


def test_semaphores_are_reserved_for_several_workspaces(
    slabs: list[int], monkeypatch: Patch
) -> None:
    """Each with all schedules. Fewer free regions do not suffice, and stay in use."""
    in_use = semaphores._REGIONS - 8
    for index in range(in_use):
        semaphores_of(0, WORKSPACE + index, 0)
    reserve_semaphores(0, workspaces=2)
    assert slabs == [0]
    workspaces = 3 + semaphores._REGIONS // 4
    reserve_semaphores(0, workspaces=workspaces)
    capture(monkeypatch)

    for index in range(workspaces):
        for schedule_id in range(4):
            semaphores_of(0, WORKSPACE - 1 - index, schedule_id)

    assert slabs == [0, 0, 0]
    assert len(set(semaphores._regions.values())) == in_use + 4 * workspaces


def test_running_out_in_a_capture_is_rejected(slabs: list[int], monkeypatch: Patch) -> None:
    """The message has the remedy; a workspace with semaphores has them for every schedule."""
    found = semaphores_of(0, WORKSPACE, 2)
    for index in range(1, semaphores._REGIONS):
        semaphores_of(0, WORKSPACE + index, 0)
    capture(monkeypatch)

    with pytest.raises(CaptureError) as caught:
        semaphores_of(0, WORKSPACE - 1, 0)

    assert str(caught.value) == (
        "workspace_buffer: expected one with semaphores, got one without while a CUDA graph is "
        "captured and no free ones are left; make a call with this workspace once before the "
        "capture"
    )
    assert slabs == [0]
    assert {semaphores_of(0, WORKSPACE, schedule_id) for schedule_id in range(5)} == {found}


def test_schedule_ids_are_unique() -> None:
    """No id is zero, the content of a new workspace."""
    numbers = [new_schedule_id() for _ in range(3)]
    assert len({0, *numbers}) == 4
