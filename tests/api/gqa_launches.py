"""Grouped-query decode calls whose launches are recorded, without a GPU."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
import torch

import mlagen.decode
import mlagen.xqa
from mlagen.api import calls, gqa_call
from mlagen.api.gqa_inputs import GqaInputs
from mlagen.api.gqa_plan import plan_gqa_call
from mlagen.api.gqa_request import check_request
from mlagen.runtime.loader import LoadedKernel
from mlagen.spec.arch import Arch
from mlagen.spec.kernel import KernelSpec
from tests.gqa_problems import GqaCase
from tests.xqa_semantics import xqa_arguments


def inputs_of(case: GqaCase, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> GqaInputs:
    """Return what the entry point makes of a case, with some of its fields changed."""
    seen: list[GqaInputs] = []
    monkeypatch.setattr("mlagen.decode.run_gqa", lambda inputs, _: seen.append(inputs))
    mlagen.decode.xqa_batch_decode_with_kv_cache(**case.build("cpu").arguments())
    return seen[0]._replace(**changes)


def xqa_inputs_of(case: GqaCase, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> GqaInputs:
    """Return what ``xqa`` makes of a case."""
    seen: list[GqaInputs] = []
    monkeypatch.setattr("mlagen.xqa.run_gqa", lambda inputs, _: seen.append(inputs))
    mlagen.xqa.xqa(**xqa_arguments(case.build("cpu")))
    return seen[0]._replace(**changes)


Launch = tuple[str, int, bool, dict[str, float]]


def launches_of(
    inputs: GqaInputs, monkeypatch: pytest.MonkeyPatch
) -> tuple[gqa_call.GqaCall, torch.Tensor, list[Launch]]:
    """Run a call whose launches are recorded, each with its values by name."""
    monkeypatch.setattr("mlagen.api.gqa_plan.arch_of_device", lambda _: Arch(90, "a"))
    monkeypatch.setattr("mlagen.api.gqa_plan.device_facts", lambda _: _Facts)
    for module in (gqa_call, calls):
        monkeypatch.setattr(module, "kernel_for", lambda spec, _: _loaded(spec))
    plan_gqa_call.cache_clear()
    request = check_request(inputs)
    on_a_gpu = replace(request, device=torch.device("cuda", 0))
    call = replace(gqa_call._prepare(inputs, on_a_gpu), request=request)
    plan_gqa_call.cache_clear()
    launches: list[Launch] = []

    def record(kernel: LoadedKernel, blocks: int, enable_pdl: bool, *values: float) -> None:
        kernel.packing.pack(*values)  # what the driver would be given can be made of them
        names = [parameter.name for parameter in kernel.spec.parameters]
        named = dict(zip(names, values, strict=True))
        launches.append((kernel.spec.family, blocks, enable_pdl, named))

    monkeypatch.setattr(gqa_call, "launch", record)
    return call, gqa_call._run_on_gpu(call, inputs, enable_pdl=True), launches


class _Facts:
    sm_count = 132


def _loaded(spec: KernelSpec) -> LoadedKernel:
    packing = struct.Struct("<" + "".join(parameter.code for parameter in spec.parameters))
    return LoadedKernel(spec, 0, packing, None, None)
