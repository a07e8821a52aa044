"""MLA decode calls whose launches are recorded instead of made; needs no GPU."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from mlagen.api import calls, mla_call, mla_plan
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_request import check_request
from mlagen.runtime.device import DeviceFacts
from mlagen.runtime.loader import LoadedKernel
from mlagen.spec.arch import Arch
from mlagen.spec.kernel import KernelSpec

# Each changes one thing that a call is remembered by of a contiguous fp32 matrix.
FACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shape": lambda tensor: tensor[1:],
    "strides": lambda tensor: tensor.repeat_interleave(2, dim=-1)[..., ::2],
    "dtype": lambda tensor: tensor.view(torch.int32),
}


class Launch(NamedTuple):
    """One launch, with its values by name."""

    family: str
    blocks: int
    enable_pdl: bool
    values: dict[str, float]


class Launched(NamedTuple):
    """A call and what it launched."""

    call: mla_call.MlaCall
    out: torch.Tensor
    launches: list[Launch]


def record_launches(
    monkeypatch: pytest.MonkeyPatch,
    *,
    calling: ModuleType = mla_call,
    planning: ModuleType = mla_plan,
    planner: str = "plan_call",
) -> list[Launch]:
    """Let GPU 0 be an H200 that only records what the modules of a family give it."""
    facts = DeviceFacts(index=0, name="", major=9, minor=0, sm_count=132, memory_bytes=0)
    recorded: list[Launch] = []

    def record(kernel: LoadedKernel, blocks: int, enable_pdl: bool, *values: float) -> None:
        kernel.packing.pack(*values)  # what the driver would be given can be made of them
        names = [parameter.name for parameter in kernel.spec.parameters]
        named = dict(zip(names, values, strict=True))
        recorded.append(Launch(kernel.spec.family, blocks, enable_pdl, named))

    def loaded(spec: KernelSpec, _: int) -> LoadedKernel:
        packing = struct.Struct("<" + "".join(parameter.code for parameter in spec.parameters))
        return LoadedKernel(spec, 0, packing, None, None)

    monkeypatch.setattr(calling, planner, getattr(planning, planner).__wrapped__)
    monkeypatch.setattr(planning, "arch_of_device", lambda _: Arch(90, "a"))
    monkeypatch.setattr(planning, "device_facts", lambda _: facts)
    for module in (calling, calls):
        monkeypatch.setattr(module, "kernel_for", loaded)
    monkeypatch.setattr(calling, "launch", record)
    return recorded


def launched(inputs: MlaInputs, launches: list[Launch]) -> Launched:
    """Run a call of tensors on the CPU as if they were on the GPU."""
    request = check_request(inputs)
    on_gpu = replace(request, device=torch.device("cuda", 0))
    call = replace(mla_call._prepare(inputs, on_gpu), request=request)
    out, _ = mla_call._run_on_gpu(call, inputs, enable_pdl=True)
    return Launched(call, out, launches)
