"""The sm80 MLA kernel on the CPU: its own source, with fibers for threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from mlagen.families.common import launchers as calls
from mlagen.families.mla import dispatch as mla_call
from mlagen.families.mla import launch_sm80 as mla_sm80_launcher
from mlagen.families.mla import select as mla_plan
from mlagen.families.mla.problem import check_problem
from mlagen.runtime.device import DeviceFacts
from mlagen.runtime.loader import LoadedKernel
from tests.emulator.emulated import COMPILER, Emulator
from tests.families.launches import SM80_PATH, record_launches
from tests.kernels import SM_80
from tests.problems.mla import MlaCase, MlaProblem, mla_case

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


class Emulated(NamedTuple):
    """A case, and how many SMs there are."""

    case: MlaCase
    sm_count: int = 1


def given(kind: str, name: str, sm_count: int = 1, **facts: Any) -> Emulated:
    """Return a case of one of the kinds of rows."""
    return Emulated(mla_case(kind, name=f"{kind}, {name}", **facts), sm_count)


# A rank that has more tokens than its causal lengths have.
RANK = {"cp_world": 3, "cp_rank": 1, "tokens_ahead": 2}
CASES = [
    given("bf16", "ragged", heads=5, seq_lens=(100, 9, 0), q_lens=(3, 1, 2), with_sinks=True),
    given("fp16", "splits", 8, heads=3, seq_lens=(300, 40), page_size=24),
    given("e4m3", "pages", heads=4, seq_lens=(100, 17), q_len=2, page_size=16),
    given("bf16 over fp8_ds_mla", "lists", heads=4, top_k=70, seq_lens=(100, 30)),
    given("fp8_per_token", "pages", heads=4, seq_lens=(70, 30)),
    given("bf16", "rank 1 of 3", 4, heads=5, seq_lens=(300, 9, 1, 0), q_lens=(3, 1, 2, 2), **RANK),
]

Decode = Callable[[Emulated, MlaProblem], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Decode:
    """Return what computes a problem by emulated launches."""
    record_launches(monkeypatch, paths=SM80_PATH, arch=SM_80)
    emulator = Emulator()

    def run(given: Emulated, problem: MlaProblem) -> tuple[torch.Tensor, torch.Tensor]:
        facts = DeviceFacts(
            index=0, name="", major=8, minor=0, sm_count=given.sm_count, memory_bytes=0
        )

        def launch(kernel: LoadedKernel, blocks: int, _: bool, *values: float | bytes) -> None:
            emulator.launch(kernel.spec, kernel.packing.pack(*values), blocks, 0)

        monkeypatch.setattr(mla_plan, "device_facts", lambda _: facts)
        for module in (calls, mla_sm80_launcher):
            monkeypatch.setattr(module, "launch", launch)
        workspace = torch.full((1 << 20,), 0xFF, dtype=torch.uint8)
        inputs = problem.inputs(return_lse=True, workspace_buffer=workspace)
        request = check_problem(inputs)
        on_gpu = replace(request, device=torch.device("cuda", 0))
        call = mla_sm80_launcher.make_sm80_launcher(inputs, on_gpu, 0)
        out, lse = mla_call.MLA.launch(replace(call, problem=request), inputs, enable_pdl=False)
        return out, lse

    return run


@pytest.mark.parametrize("given", CASES, ids=lambda given: given.case.name)
def test_a_kernel_is_right_in_whatever_order_warps_come(given: Emulated, decoded: Decode) -> None:
    """Within the tolerance of float64, and no copy is read before its thread has waited for it."""
    problem = given.case.build("cpu")

    problem.check(*decoded(given, problem))
