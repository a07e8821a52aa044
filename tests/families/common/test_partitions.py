"""Calls in a context with fewer SMs than its GPU, such as a green context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from mlagen.families.common import dispatch, launchers
from mlagen.families.gqa import launch as gqa_launch
from mlagen.families.mla import launch as mla_launch
from mlagen.runtime import partition
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.partition import TooManyCtasError
from mlagen.settings import current_settings
from tests.families.entry_points import ROWS, EntryPoint, make_entry_point
from tests.families.launches import H200_FACTS
from tests.fixture_types import Patch

GPU_SMS = H200_FACTS.sm_count
# The device index of CPU tensors.
DEVICE = -1
# Entry points.
MLA, GQA = "trtllm", "trtllm_gqa"


@dataclass
class Context:
    """A simulated context: its SMs, the maximum of CTAs of a grid, and rejected launches."""

    sms: int = GPU_SMS
    max_blocks: int = GPU_SMS
    rejections: int = 0

    def enter(self, sms: int, max_blocks: int | None = None) -> None:
        """Make a context of ``sms`` SMs current."""
        self.sms = sms
        self.max_blocks = sms if max_blocks is None else max_blocks

    def check(self, kernel: LoadedKernel, blocks: int) -> None:
        """Reject a persistent grid above the maximum, a cooperative one at any time."""
        is_first = kernel.spec.is_cooperative or not partition.partitioned_gpus
        if kernel.spec.is_persistent and is_first and blocks > self.max_blocks:
            self.rejections += 1
            raise TooManyCtasError("too large", symbol="x", device=DEVICE, num_ctas=blocks)


@dataclass(frozen=True)
class _Checked:
    """A launch whose replay may be rejected."""

    context: Context
    kernel: LoadedKernel
    blocks: int
    made: Any

    def enqueue(self, enable_pdl: bool) -> None:
        self.context.check(self.kernel, self.blocks)
        self.made.enqueue(enable_pdl)


@pytest.fixture
def entry_point(request: pytest.FixtureRequest, monkeypatch: Patch) -> EntryPoint:
    """Return the entry point with an empty call cache: a parameter, or else one of MLA."""
    return make_entry_point(monkeypatch, ROWS[getattr(request, "param", MLA)])


@pytest.fixture
def context(entry_point: EntryPoint, monkeypatch: Patch) -> Context:
    """Return the simulated context of ``entry_point``'s launches."""
    assert entry_point.launches == []
    context = Context()
    monkeypatch.setattr(partition, "device_facts", lambda _: H200_FACTS)
    monkeypatch.setattr(partition, "partitioned_gpus", set())
    monkeypatch.setattr(partition, "_rejected", set())
    monkeypatch.setattr(partition, "_current_sms", lambda _: context.sms % GPU_SMS)
    record = vars(launchers)["launch"]

    def launch(kernel: LoadedKernel, blocks: int, *values: Any) -> _Checked:
        context.check(kernel, blocks)
        return _Checked(context, kernel, blocks, record(kernel, blocks, *values))

    monkeypatch.setattr(launchers, "launch", launch)
    return context


TOO_SMALL = {"workspace_buffer": torch.zeros(1)}


def grid(entry_point: EntryPoint, arguments: dict[str, Any]) -> tuple[str, int]:
    """Return the kernel and the CTAs of a call's first launch."""
    outcome = entry_point.outcome(arguments)
    assert entry_point.launches, outcome
    return entry_point.launches[0].family, entry_point.launches[0].blocks


def long_call(row: str = MLA) -> dict[str, Any]:
    """Return the arguments of a call with work for every SM."""
    more = {"max_seq_len": 50_000, "workspace_buffer": torch.zeros(1 << 23)}
    unlimited = {"window_left": -1} if row == GQA else {}
    return ROWS[row].build() | more | unlimited


families = pytest.mark.parametrize(
    ("entry_point", "row"), [(MLA, MLA), (GQA, GQA)], indirect=["entry_point"], ids=["mla", "gqa"]
)


@families
@pytest.mark.parametrize("has_entry", [True, False], ids=["cached", "new"])
def test_a_grid_is_as_large_as_its_context(
    entry_point: EntryPoint, row: str, context: Context, has_entry: bool
) -> None:
    """One launch is rejected and none after; calls on the whole GPU are unaffected."""
    arguments = long_call(row)
    whole = [entry_point.uncached_outcome(arguments)] * 3
    if has_entry:  # for the whole GPU
        assert [entry_point.outcome(arguments) for _ in range(3)] == whole
    context.enter(16)

    inside = [grid(entry_point, arguments) for _ in range(4)]

    family, blocks = inside[0]
    assert family == ("mla_sm90" if row == MLA else "gqa_sm90")
    assert 0 < blocks <= 16
    assert inside == inside[:1] * 4
    assert context.rejections == 1
    assert not entry_point.is_planned(arguments)
    context.enter(GPU_SMS)
    assert [entry_point.outcome(arguments) for _ in range(3)] == whole
    context.enter(32)
    assert 16 < grid(entry_point, arguments)[1] <= 32
    assert context.rejections == 1


def test_a_driver_that_rejects_every_cooperative_grid(
    entry_point: EntryPoint, context: Context
) -> None:
    """Calls use the sm80 kernel, whose CTAs do not wait for each other, in that context only."""
    arguments = long_call()
    whole = entry_point.outcome(arguments)
    context.enter(16, max_blocks=0)

    inside = [grid(entry_point, arguments) for _ in range(4)]

    assert {family for family, _ in inside} == {"mla_sm80"}
    assert context.rejections == 2
    context.enter(GPU_SMS)
    assert entry_point.outcome(arguments) == whole


def test_a_forced_kernel_does_not_fall_back(
    entry_point: EntryPoint, context: Context, monkeypatch: Patch
) -> None:
    """If the driver rejects all grids of a forced kernel, an error is raised."""
    monkeypatch.setenv("MLAGEN_MLA_KERNEL", "sm90")
    current_settings.cache_clear()
    context.enter(16, max_blocks=0)

    outcomes = [entry_point.outcome(long_call()) for _ in range(3)]

    expected = "UnsupportedError: MLAGEN_MLA_KERNEL=sm90: expected a context whose SMs hold all"
    assert all(outcome.startswith(expected) for outcome in outcomes)


@families
def test_the_sm80_kernel_splits_for_its_context(
    entry_point: EntryPoint, row: str, context: Context, monkeypatch: Patch
) -> None:
    """On 16 SMs a sequence has fewer splits, once the sm90 kernel has found them."""
    context.enter(16)
    entry_point.call(long_call(row))
    family = entry_point.row.family
    monkeypatch.setenv(f"MLAGEN_{family.upper()}_KERNEL", "sm80")
    current_settings.cache_clear()

    inside = grid(entry_point, long_call(row))
    too_small = grid(entry_point, long_call() | TOO_SMALL) if row == MLA else None
    context.enter(GPU_SMS)
    whole = grid(entry_point, long_call(row))

    assert {inside[0], whole[0]} == {f"{family}_sm80"}
    assert inside[1] < whole[1]
    if row == MLA:  # unless the workspace is too small for the splits
        assert inside[1] <= 4 * 16 < whole[1]
        assert too_small == whole


@families
def test_a_workspace_for_the_whole_gpu_is_sufficient(
    entry_point: EntryPoint, row: str, context: Context, monkeypatch: Patch
) -> None:
    """A plan for 16 SMs that needs a larger workspace is not launched, of either kernel."""
    family, arguments = entry_point.row.family, long_call(row)

    def grid_of(kernel: str) -> tuple[str, int]:
        monkeypatch.setenv(f"MLAGEN_{family.upper()}_KERNEL", kernel)
        current_settings.cache_clear()
        return grid(entry_point, arguments)

    whole = {kernel: grid_of(kernel) for kernel in ("sm80", "auto")}
    context.enter(16)
    assert grid(entry_point, arguments)[1] <= 16

    launch = mla_launch if row == MLA else gqa_launch
    for module, planner in ((dispatch, "plan_sm80_call"), (launch, f"plan_{family}_sm90_call")):
        plan_on = getattr(module, planner)

        def plan(*given: Any, sms: int = 0, plan_on: Any = plan_on, **others: Any) -> Any:
            spec, planned = plan_on(*given, sms=sms, **others)
            return spec, replace(planned, workspace_bytes=1 << 40) if sms else planned

        monkeypatch.setattr(module, planner, plan)

    if row == MLA:  # CTAs of the sm90 kernel would wait for those that have no SM
        whole["auto"] = whole["sm80"]
    assert {kernel: grid_of(kernel) for kernel in whole} == whole
