"""The sm80 grouped-query kernel and the combine kernel on the CPU: their own source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.families.gqa import dispatch as gqa_call
from mlagen.families.gqa import launch as gqa_launch
from mlagen.families.gqa import select as gqa_plan
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.problem import check_problem
from tests.emulator.emulated import COMPILER, Emulated, replace_launches
from tests.families.launches import H200, record_launches
from tests.kernels import SM_80
from tests.problems.batch_decode import decode_planned
from tests.problems.entry_points import decode_gqa_with_lse, not_written
from tests.problems.gqa import GqaCase, GqaProblem
from tests.problems.problem import E4M3

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


FP16 = torch.float16


def given(
    name: str, sm_count: int = 1, has_cvt_e4m3: bool = False, **facts: Any
) -> Emulated[GqaCase]:
    """Return a case on so many SMs."""
    return Emulated(GqaCase(name=name, **facts), sm_count, has_cvt_e4m3)


_OUT: dict[str, Any] = {"kv": "e4m3", "out_dtype": E4M3, "output_scale": 0.5}
_MASKED: dict[str, Any] = {"mask": "random", "window": 40}
_RAGGED: dict[str, Any] = {"seq_lens": (70, 50, 0, 33), "q_lens": (5, 0, 2, 3)}
CASES = [
    given("ragged lengths", seq_lens=(100, 17, 0), kv_heads=1, page_size=64),
    given("splits", 16, seq_lens=(300, 40, 0), kv_heads=1, group=2, sink=2.0),
    given("ragged queries", group=4, head_dim=64, dtype=FP16, layout="HND", **_RAGGED),
    given(
        "a draft mask and a window",
        seq_lens=(130, 60),
        kv_heads=1,
        q_len=5,
        head_dim=64,
        **_MASKED,
    ),
    given("not causal", 9, seq_lens=(300, 3), q_len=9, head_dim=64, causal=False, sink=2.0),
    given("e4m3 in software", seq_lens=(100,), kv="e4m3", kv_heads=1, head_dim=64),
    given("e4m3 in and out", seq_lens=(100,), head_dim=64, **_OUT),
    given("int8", seq_lens=(100,), kv="int8", output_scale=0.02, head_dim=64),
    given("stacked", seq_lens=(70, 3), cache_layout="stacked", layout="HND", head_dim=64),
    given("nvfp4 stacked", seq_lens=(70,), kv="nvfp4", cache_layout="stacked", head_dim=64),
    given("nvfp4", 1, True, seq_lens=(100, 30), kv="nvfp4", o_scale=0.5, head_dim=64),
]

Decode = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Decode:
    """Return what computes a problem by emulated launches."""

    def run(
        problem: GqaProblem,
        given: Emulated[GqaCase],
        seed: int,
        decode: Decode = decode_gqa_with_lse,
        **changes: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arch = H200 if given.has_cvt_e4m3 else SM_80
        record_launches(monkeypatch, arch=arch)

        def run(inputs: GqaArgs, *_: object) -> tuple[torch.Tensor, ...]:
            request = check_problem(inputs)
            on_gpu = replace(request, device=torch.device("cuda", 0))
            call = gqa_launch.make_sm80_launcher(inputs, on_gpu)
            return gqa_call.GQA.launch(replace(call, problem=request), inputs)

        replace_launches(monkeypatch, gqa_plan, sm_count=given.sm_count, seed=seed)
        monkeypatch.setattr(gqa_call.GQA, "run", run)
        workspace = torch.full((1 << 20,), 0xFF, dtype=torch.uint8)
        return decode(problem, **not_written(problem, workspace) | changes)

    return run


@pytest.mark.parametrize("given", CASES, ids=lambda given: given.case.name)
def test_a_kernel_is_right_in_whatever_order_warps_come(
    given: Emulated[GqaCase], decoded: Decode
) -> None:
    """Within the tolerance of float64, and no copy is read before its thread has waited for it."""
    problem = given.case.build("cpu")
    for seed in range(2):
        problem.check(*decoded(problem, given, seed))


@pytest.mark.parametrize("sm_count", [1, 16], ids=["whole", "split"])
def test_an_lse_may_be_natural(sm_count: int, decoded: Decode) -> None:
    """The LSE of whole sequences and of splits is in the base of the call, sinks included."""
    case = GqaCase(seq_lens=(300, 0), kv_heads=1, group=8, head_dim=64, sink=3.0)
    problem = case.build("cpu")

    problem.check(
        *decoded(problem, Emulated(case, sm_count), 0, return_lse_base="basee"), natural=True
    )


@pytest.mark.parametrize("kv", ["16-bit", "nvfp4"])
def test_page_ids_of_a_plan_are_flat(kv: str, decoded: Decode) -> None:
    """Each request reads its own page ids, for its rows and for their scales."""
    case = GqaCase(seq_lens=(100, 0, 40), kv=kv, head_dim=64, kv_heads=1)

    problem = case.build("cpu")

    problem.check(*decoded(problem, Emulated(case, 8), 0, decode=decode_planned))
