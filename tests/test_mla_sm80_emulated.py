"""The sm80 MLA kernel on the CPU: its own source, with fibers for threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.families.mla import dispatch as mla_call
from mlagen.families.mla import launch as mla_launch
from mlagen.families.mla import plan as mla_plan
from mlagen.families.mla.problem import check_problem
from mlagen.spec.dtype import ROW_FORMATS, DType
from tests.emulator.emulated import COMPILER, Emulated, replace_launches
from tests.families.launches import record_launches
from tests.kernels import SM_80
from tests.problems.entry_points import decode_with_lse
from tests.problems.mla import MlaCase, MlaProblem
from tests.test_mla_emulated import RANK, given

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


_FEW: dict[str, Any] = {"heads": 4, "seq_lens": (70, 3)}
CASES = [
    given("bf16", "ragged", heads=5, seq_lens=(100, 9, 0), q_lens=(3, 1, 2), with_sinks=True),
    given("fp16", "splits", 8, heads=3, seq_lens=(300, 40), page_size=24),
    given("e4m3", "pages", heads=4, seq_lens=(100, 17), q_len=2, page_size=16),
    given("e4m3", "no rope", 4, qk_rope_head_dim=0, heads=4, seq_lens=(200, 9), with_sinks=True),
    given("bf16 over fp8_ds_mla", "lists", heads=4, top_k=70, seq_lens=(100, 30)),
    given("e4m3 over fp8_ds_mla", "lists", heads=4, top_k=70, seq_lens=(100, 30)),
    *(
        given(kind, "no rope", q_len=2, qk_rope_head_dim=0, **_FEW)
        for kind in ("bf16 over fp8_ds_mla", "e4m3 over fp8_ds_mla")
    ),
    given("fp8_per_token", "pages", heads=4, seq_lens=(70, 30)),
    given("bf16", "parts apart", q_len=2, separate_rope=True, flat_tables=True, **_FEW),
    given("bf16", "values in other pages", values="other pages", with_sinks=True, **_FEW),
    given(
        "e4m3",
        "splits, values in another cache",
        8,
        heads=4,
        seq_lens=(300, 40),
        values="other cache",
        bmm2_scales_scores=True,
    ),
    given("bf16", "a bias for all heads", bias="one for all heads", **_FEW),
    given("bf16", "a bias for each head", bias="for each head", q_len=2, is_causal=False, **_FEW),
    given("bf16 over e4m3 with two scales", "pages", **_FEW),
    given("bf16 over e4m3 with scales for 128 elements", "pages", **_FEW),
    given("bf16", "top-k lengths", q_len=2, top_k=70, with_top_k_lens=True, **_FEW),
    given("bf16", "rank 1 of 3", 4, heads=5, seq_lens=(300, 9, 1, 0), q_lens=(3, 1, 2, 2), **RANK),
]

Decode = Callable[[Emulated[MlaCase], MlaProblem], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Decode:
    """Return what computes a problem by emulated launches."""
    record_launches(monkeypatch, arch=SM_80)

    def run(given: Emulated[MlaCase], problem: MlaProblem) -> tuple[torch.Tensor, torch.Tensor]:

        replace_launches(monkeypatch, mla_plan, sm_count=given.sm_count, seed=0)
        workspace = torch.full((1 << 20,), 0xFF, dtype=torch.uint8)
        inputs = problem.inputs(return_lse=True, workspace_buffer=workspace)
        request = check_problem(inputs)
        on_gpu = replace(request, device=torch.device("cuda", 0))
        call = mla_launch.make_sm80_launcher(inputs, on_gpu)
        out, lse = mla_call.MLA.launch(replace(call, problem=request), inputs)
        return out, lse

    return run


@pytest.mark.parametrize("given", CASES, ids=lambda given: given.case.name)
def test_a_kernel_is_right_in_whatever_order_warps_come(
    given: Emulated[MlaCase], decoded: Decode
) -> None:
    """Within the tolerance of float64, and no copy is read before its thread has waited for it."""
    problem = given.case.build("cpu")
    problem.check(*decoded(given, problem))


@pytest.mark.parametrize("rope", [64, 0])
def test_a_row_format_is_the_fields_of_its_description(
    rope: int, decoded: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a scale per 64 elements, checks, CPU backend and sm80 kernel follow, unedited."""
    row = replace(ROW_FORMATS[DType.FP8_DS_MLA], scaled_elements=64)
    monkeypatch.setitem(ROW_FORMATS, DType.FP8_DS_MLA, row)
    facts = {**_FEW, "qk_rope_head_dim": rope, "page_size": 8}  # no other test has these pages
    planted = given("bf16 over fp8_ds_mla", "64 per scale", **facts)
    problem = planted.case.build("cpu")

    assert problem.kv_cache.shape[-1] == 512 + 8 * 4 + rope * 2
    problem.check(*decode_with_lse(problem))
    problem.check(*decoded(planted, problem))
