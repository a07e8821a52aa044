"""Decode calls that record their launches instead of enqueuing them; needs no GPU."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from mlagen.families import workspace
from mlagen.families.common import dispatch, plan_sm80
from mlagen.families.common import launchers as calls
from mlagen.families.dispatch import GQA, MLA
from mlagen.families.gqa import launch as gqa_launch
from mlagen.families.gqa import plan as gqa_plan
from mlagen.families.gqa import tensor_maps as gqa_maps
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.mla import launch as mla_launch
from mlagen.families.mla import plan as mla_plan
from mlagen.families.mla import tensor_maps as mla_maps
from mlagen.families.mla.args import MlaArgs
from mlagen.runtime.device import DeviceFacts
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.packing import ParameterPacking
from mlagen.runtime.tensor_map import TiledTensor
from mlagen.settings import current_settings
from mlagen.spec.arch import Arch
from mlagen.spec.kernel import KernelSpec
from tests.fixture_types import Patch
from tests.problems.entry_points import ENTRY_POINTS
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase, MlaProblem

Case = MlaCase | GqaCase
H200 = Arch(90, "a")
H200_FACTS = DeviceFacts(index=0, name="", major=9, minor=0, sm_count=132, memory_bytes=0)

# Each changes one property of a contiguous fp32 matrix that the call signature contains.
PROPERTIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shape": lambda tensor: tensor[1:],
    "strides": lambda tensor: tensor.repeat_interleave(2, dim=-1)[..., ::2],
    "dtype": lambda tensor: tensor.view(torch.int32),
}


class _OnAnotherGpu(torch.Tensor):
    """Stand-in for a tensor on GPU 1."""

    def get_device(self) -> int:
        return 1


PROPERTIES_AND_DEVICE = PROPERTIES | {"device": lambda tensor: tensor.as_subclass(_OnAnotherGpu)}


class Launch(NamedTuple):
    """One launch, with its values by name."""

    family: str
    blocks: int
    enable_pdl: bool
    values: dict[str, Any]


Launches = list[Launch]


class _Replay(NamedTuple):
    """A recorded launch that can be enqueued again."""

    recorded: Launches
    launch: Launch
    kernel: LoadedKernel

    def enqueue(self, enable_pdl: bool) -> None:
        self.recorded.append(self.launch._replace(enable_pdl=enable_pdl))


class Launched(NamedTuple):
    """A call with its output and launches."""

    call: Any  # the launcher
    out: torch.Tensor
    launches: Launches

    @property
    def families(self) -> list[str]:
        """The kernel families of the launches."""
        return [launch.family for launch in self.launches]


# The modules that take a plan, and that make it, with the planning function.
PATHS = (
    (dispatch, plan_sm80, "plan_sm80_call"),
    (mla_launch, mla_plan, "plan_mla_sm90_call"),
    (gqa_launch, gqa_plan, "plan_gqa_sm90_call"),
)


def record_launches(monkeypatch: Patch, *, arch: Arch = H200) -> Launches:
    """Simulate GPU 0 with 132 SMs, and record the launches of calls."""
    recorded: Launches = []

    def record(kernel: LoadedKernel, blocks: int, enable_pdl: bool, values: Any) -> _Replay:
        fields = kernel.spec.parameters
        packed = kernel.packing.struct.pack(*values)  # as the driver gets them
        unpacked = struct.unpack("<" + "".join(field.code for field in fields), packed)
        named = dict(zip([field.name for field in fields], unpacked, strict=True))
        floats = [field.name for field in fields if field.code == "f" and not field.is_constant]
        named |= zip(floats, values[-len(floats) :], strict=True)  # before rounding to float32
        recorded.append(Launch(kernel.spec.family, blocks, enable_pdl, named))
        return _Replay(recorded, recorded[-1], kernel)

    def loaded(spec: KernelSpec, _: int) -> LoadedKernel:
        return LoadedKernel(spec, 0, ParameterPacking(spec), None, None)

    for calling, planning, planner in PATHS:
        monkeypatch.setattr(calling, planner, getattr(planning, planner).__wrapped__)
        monkeypatch.setattr(planning, "arch_of_device", lambda _: arch)
        monkeypatch.setattr(planning, "device_facts", lambda _: H200_FACTS)
    for module in (mla_launch, gqa_launch):
        monkeypatch.setattr(module, "arch_of_device", lambda _: arch)
    monkeypatch.setattr(calls, "kernel_for", loaded)
    monkeypatch.setattr(calls, "launch", record)
    monkeypatch.setattr(calls, "semaphores_of", semaphores_of)
    monkeypatch.setattr(mla_plan, "new_schedule_id", lambda: SCHEDULE_ID)
    monkeypatch.setattr(mla_maps, "encode", map_of)
    monkeypatch.setattr(gqa_maps, "encode", map_of)
    monkeypatch.setattr(mla_launch, "maps_of", mla_maps.maps_of.__wrapped__)
    monkeypatch.setattr(gqa_launch, "maps_of", gqa_maps.maps_of.__wrapped__)
    return recorded


SCHEDULE_ID = 5


def semaphores_of(_: int, workspace: int, schedule_id: int) -> int:
    """Return the simulated address of semaphores, unique for each workspace and schedule."""
    return workspace + (1 << 40) * (1 + schedule_id)


def map_of(tensor: TiledTensor, address: int) -> bytes:
    """Return bytes that simulate the map of a tensor, unique for each tensor."""
    return hashlib.sha512(repr((tensor, address)).encode()).digest() * 2


def simulate_h200(monkeypatch: Patch) -> Iterator[None]:
    """Plan for an H200 as GPU 0, until the iterator goes on."""
    plans = [getattr(planning, name) for _, planning, name in PATHS]
    for module in (plan_sm80, mla_plan, gqa_plan, workspace):
        monkeypatch.setattr(module, "arch_of_device", lambda _: H200)
        monkeypatch.setattr(module, "device_facts", lambda _: H200_FACTS)
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


def args_of(case: Case, entry: str = "xqa_batch", **changes: Any) -> Any:
    """Return the arguments of a case, of GQA those that an entry point makes, some changed."""
    problem = case.build("cpu")
    if isinstance(problem, MlaProblem):
        return problem.inputs(**changes)
    seen: list[GqaArgs] = []

    def run(args: GqaArgs, *_: object) -> tuple[torch.Tensor, ...]:
        seen.append(args)
        return (problem.query if args.out is None else args.out,)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GQA, "run", run)
        ENTRY_POINTS[entry].call(problem)
    return seen[0]._replace(**changes)


def launched(args: Any, launches: Launches, kernel: str = "sm80") -> Launched:
    """Run a call on CPU tensors as if on the GPU, and return its part of the recorded launches."""
    is_mla = isinstance(args, MlaArgs)
    calls: Any = MLA if is_mla else GQA
    args, request = calls.family.validate(args)
    on_gpu = replace(request, device=torch.device("cuda", 0))
    setting = {"mla_kernel" if is_mla else "gqa_kernel": kernel}
    settings = replace(current_settings(), **setting)  # type: ignore[arg-type]
    args = args._replace(enable_pdl=True)
    call = replace(calls.plan(args, on_gpu, settings), problem=request)
    before = len(launches)
    outputs = calls.launch(call, args)
    return Launched(call, outputs[0], launches[before:])
