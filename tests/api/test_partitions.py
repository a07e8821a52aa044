"""MLA calls in a context that has fewer SMs than its GPU, as a green context has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import mlagen.mla
from mlagen.api import mla_call, mla_sm90_fp8kv_launcher, mla_sm90_launcher
from mlagen.errors import ArgumentError
from mlagen.runtime import partition
from mlagen.runtime.device import DeviceFacts
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.partition import TooManyBlocksError
from mlagen.settings import current_settings
from tests.api.fast_path_calls import Door, open_door
from tests.api.test_mla_fast_path import usual_arguments

GPU_SMS = 132
# What stands for the GPU of tensors that are on the CPU.
DEVICE = -1


@dataclass
class Context:
    """What launches find: how many SMs, how many blocks the driver takes, what it has rejected."""

    sms: int = GPU_SMS
    max_blocks: int = GPU_SMS
    rejections: int = 0

    def enter(self, sms: int, max_blocks: int | None = None) -> None:
        """Make a context of so many SMs current."""
        self.sms = sms
        self.max_blocks = sms if max_blocks is None else max_blocks

    def check(self, kernel: LoadedKernel, blocks: int) -> None:
        """Reject a cooperative grid that is too large."""
        if kernel.spec.is_cooperative and blocks > self.max_blocks:
            self.rejections += 1
            raise TooManyBlocksError("too large", symbol="x", device=DEVICE, blocks=blocks)


@dataclass(frozen=True)
class _Checked:
    """A launch that may be rejected whenever it is made again."""

    context: Context
    kernel: LoadedKernel
    blocks: int
    made: Any

    def enqueue(self, enable_pdl: bool) -> None:
        self.context.check(self.kernel, self.blocks)
        self.made.enqueue(enable_pdl)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Door:
    """Return the entry point, where nothing is remembered."""
    return open_door(monkeypatch, mla_call, mlagen.mla.trtllm_batch_decode_with_kv_cache_mla)


@pytest.fixture
def context(door: Door, monkeypatch: pytest.MonkeyPatch) -> Context:
    """Return the context that launches of ``door`` find."""
    assert door.launches == []
    context = Context()
    facts = DeviceFacts(index=0, name="", major=9, minor=0, sm_count=GPU_SMS, memory_bytes=0)
    monkeypatch.setattr(partition, "device_facts", lambda _: facts)
    monkeypatch.setattr(partition, "_partitioned", set())
    monkeypatch.setattr(partition, "_rejected", set())
    monkeypatch.setattr(partition, "_current_sms", lambda _: context.sms % GPU_SMS)
    for module in (mla_sm90_launcher, mla_sm90_fp8kv_launcher):
        record = module.launch

        def launch(
            kernel: LoadedKernel, blocks: int, *values: Any, record: Any = record
        ) -> _Checked:
            context.check(kernel, blocks)
            return _Checked(context, kernel, blocks, record(kernel, blocks, *values))

        monkeypatch.setattr(module, "launch", launch)
    return context


def grid(door: Door, arguments: dict[str, Any]) -> tuple[str, int]:
    """Return the kernel and the blocks that a call launches first."""
    outcome = door.outcome(arguments)
    assert door.launches, outcome
    return door.launches[0].family, door.launches[0].blocks


def long_call() -> dict[str, Any]:
    """Return the arguments of a call that has work for every SM."""
    return usual_arguments(max_seq_len=50_000, workspace_buffer=torch.zeros(1 << 23))


def test_a_grid_is_as_large_as_its_context(door: Door, context: Context) -> None:
    """One launch is rejected, and none after; in the whole GPU all is as it was."""
    arguments = long_call()
    whole = [door.outcome(arguments) for _ in range(3)]
    context.enter(16)

    inside = [grid(door, arguments) for _ in range(4)]

    family, blocks = inside[0]
    assert family == "mla_sm90"
    assert 0 < blocks <= 16
    assert inside == inside[:1] * 4
    assert context.rejections == 1
    context.enter(GPU_SMS)
    assert [door.outcome(arguments) for _ in range(3)] == whole
    context.enter(32)
    assert 16 < grid(door, arguments)[1] <= 32
    assert context.rejections == 1


def test_a_call_that_was_never_made_elsewhere(door: Door, context: Context) -> None:
    """Its first launch is rejected, and it is remembered for the context alone."""
    context.enter(16)

    inside = [grid(door, long_call()) for _ in range(3)]

    assert inside[0][1] <= 16
    assert inside == inside[:1] * 3
    context.enter(GPU_SMS)
    assert grid(door, long_call())[1] > 16


def test_remembered_calls_read_no_form_in_a_context(door: Door, context: Context) -> None:
    """They are found as they are in the whole GPU."""
    arguments = long_call()
    context.enter(16)
    for _ in range(3):
        door.run(**arguments)

    assert not door.reads_form(arguments)


def test_where_the_driver_rejects_what_should_fit(door: Door, context: Context) -> None:
    """Calls take the kernel whose blocks do not wait for each other, there and only there."""
    arguments = long_call()
    whole = door.outcome(arguments)
    context.enter(16, max_blocks=0)

    inside = [grid(door, arguments) for _ in range(4)]

    assert {family for family, _ in inside} == {"mla_sm80"}
    assert context.rejections == 2
    context.enter(GPU_SMS)
    assert door.outcome(arguments) == whole


def test_a_kernel_that_is_asked_for_by_name_is_not_replaced(
    door: Door, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none of its grids is taken, an error says so."""
    monkeypatch.setenv("MLAGEN_MLA_KERNEL", "sm90")
    current_settings.cache_clear()
    context.enter(16, max_blocks=0)

    outcomes = [door.outcome(long_call()) for _ in range(3)]

    expected = "UnsupportedError: MLAGEN_MLA_KERNEL=sm90: expected a context whose SMs hold all"
    assert all(outcome.startswith(expected) for outcome in outcomes)


def test_a_workspace_for_the_plans_of_the_whole_gpu_is_enough(
    door: Door, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a context would need more, the sm80 kernel is launched."""
    arguments = long_call()
    door.run(**arguments)

    def reject(*_: object) -> int:
        raise ArgumentError("workspace_buffer: too small")

    monkeypatch.setattr(mla_sm90_launcher, "scratch_offset", reject)
    context.enter(16)

    assert grid(door, arguments)[0] == "mla_sm80"
