"""Keywords of the entry points: those that change no result, sinks, and LSE, for every device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.problems.entry_points import (
    ENTRY_POINTS,
    decode_gqa_with_lse,
    decode_with_lse,
    run_xqa_with_lse,
)
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase

SCALED = {"score_scale": 0.05, "output_scale": 2.0}
DRAFTS = {"q_len": 2, "sink": 3.0}
RAGGED = {"seq_lens": (5, 100, 0), "q_lens": (1, 4, 2)}
LONG = {"seq_lens": (5000, 3)}
SPARSE = {"seq_lens": (300, 300), "q_len": 2, "kv_format": "fp8_ds_mla", "top_k": 70}
# Keywords of MLA for lower precision or for an implementation.
TUNING: dict[str, tuple[Any, ...]] = {
    "skip_softmax_threshold_scale_factor": (0.0, 0.5, 1e39, -1),
    "use_fp16_softmax": (True, False, 1),
    "cute_dsl_impl": ("auto", "modular", "monolithic"),
    "kv_scale_format": ("auto", "pow2_fp32", "arbitrary_fp32", "POW2-FP32", "Auto"),
    "is_var_seq": (False,),
    "return_lse_base": (None,),
}
# Entry point, facts of a problem, keyword, and the values that change no result.
UNUSED: list[tuple[str, dict[str, Any], str, tuple[Any, ...]]] = [
    ("trtllm", SCALED, "backend", ("auto", "xqa", "trtllm-gen", "cute-dsl", "cake")),
    ("trtllm", RAGGED, "max_q_len", (None, 0, 1, 4, 1000)),
    *(("trtllm", facts, *row) for facts in ({}, SPARSE) for row in TUNING.items()),
    ("trtllm", {}, "sparse_mla_top_k", (0,)),
    ("trtllm", {}, "sparse_mla_top_k_lens", (None,)),
    ("trtllm", {}, "uses_shared_paged_kv_idx", (True,)),
    *(("trtllm", {}, name, (False,)) for name in ("enable_pdl", "enable_dcp")),
    ("trtllm_gqa", DRAFTS, "backend", ("xqa", "trtllm-gen", "cake")),
    ("trtllm_gqa", DRAFTS, "skip_softmax_threshold_scale_factor", (1000.0,)),
    ("trtllm_gqa", DRAFTS, "bf16q_fp8kv_transform_mode", ("k_only",)),
    ("trtllm_gqa", DRAFTS, "multi_ctas_kv_counter_buffer", (torch.zeros(3, dtype=torch.uint8),)),
    ("trtllm_gqa", DRAFTS, "max_q_len", (9,)),
    ("trtllm_gqa", DRAFTS, "request_order", (torch.tensor([1, 0], dtype=torch.int32),)),
    ("trtllm_gqa", DRAFTS, "request_order_plan", (None,)),
    ("trtllm_gqa", DRAFTS, "uses_shared_paged_kv_idx", (True, 1)),
    ("trtllm_gqa", DRAFTS, "length_aware_schedule", (True, 0)),
    ("trtllm_gqa", DRAFTS, "sparse_top_k", (0,)),
    ("trtllm_gqa", DRAFTS, "o_scale", (None,)),
    *((name, {}, "q_len_per_req", (None,)) for name in ("trtllm_gqa", "xqa_batch")),
    ("xqa", LONG, "sm_count", (1, 7, 132)),
    ("xqa", {"sink": 3.0}, "kv_scale", (math.nan,)),
    ("xqa", {"sink": 3.0}, "sliding_win_size", (-1,)),
    ("flare", {}, "num_partitions", (4,)),
]


class TestKeywords:
    """Rules of keywords, on the device of the fixture."""

    @pytest.mark.parametrize(
        ("name", "facts", "keyword", "value"),
        [(*row, value) for *row, values in UNUSED for value in values],
        ids=str,
    )
    def test_a_keyword_changes_no_result(
        self, name: str, facts: dict[str, Any], keyword: str, value: object, device: str
    ) -> None:
        """Hints, scratch, neutral values and names of one semantics change no bit."""
        entry = ENTRY_POINTS[name]
        problem = entry.build(device, **{"seq_lens": (70, 3)} | facts)
        given = {keyword: value.to(device) if isinstance(value, torch.Tensor) else value}

        def results(**changes: Any) -> Any:
            if name.startswith("trtllm"):
                return entry.call(problem, **changes, return_lse=True)
            return (entry.run(problem, **changes),)

        made = results(**given)

        problem.check(*made)
        may_split = (name, keyword) == ("trtllm", "max_q_len")  # a hint that another split follows
        assert may_split or all(map(torch.equal, made, results()))

    @pytest.mark.parametrize("name", ["trtllm", "trtllm_gqa"])
    def test_sinks_may_be_a_list_of_one(self, name: str, device: str) -> None:
        """FlashInfer's list of one sinks tensor is accepted."""
        entry = ENTRY_POINTS[name]
        facts = {"with_sinks": True} if name == "trtllm" else {"sink": 3.0}
        problem = entry.build(device, seq_lens=(70, 3), **facts)

        problem.check(entry.run(problem, sinks=[problem.sinks]))

    @pytest.mark.parametrize(
        ("name", "is_written"), [("trtllm", False), ("xqa_batch", False), ("trtllm_gqa", True)]
    )
    def test_an_lse_without_return_lse(self, name: str, is_written: bool, device: str) -> None:
        """It is never returned, and one entry point writes it, as in FlashInfer."""
        entry = ENTRY_POINTS[name]
        problem = entry.build(device, seq_lens=(70, 3))
        lse = torch.full((2, problem.case.heads), 7.0, device=device)

        problem.check(entry.call(problem, lse=lse), lse if is_written else None)

        assert is_written or (lse == 7.0).all()

    @pytest.mark.parametrize("with_sinks", [True, False], ids=["sinks", "no sinks"])
    @pytest.mark.parametrize(
        ("run", "base"),
        [
            (decode_with_lse, {"return_lse_base": "base2"}),
            (decode_with_lse, {"return_lse_base": "basee"}),
            (decode_gqa_with_lse, {}),
            (run_xqa_with_lse, {}),
        ],
    )
    def test_a_fully_masked_row_has_the_lse_of_its_sink(
        self, run: Any, base: dict[str, str], with_sinks: bool, device: str
    ) -> None:
        """The output is zeros, and the LSE the sink in the requested base, or minus infinity."""
        facts: dict[str, Any] = {"seq_lens": (0, 2, 0), "q_len": 3}
        case: Any = GqaCase(**facts, sink=3.0 if with_sinks else None)
        if run is decode_with_lse:
            case = MlaCase(**facts, heads=8, with_sinks=with_sinks)
        problem = case.build(device)

        out, lse = run(problem, **base)

        unit = 1.0 if "basee" in base.values() else math.log(2)
        problem.check(out, lse, natural=unit == 1.0)
        wanted = torch.full((8,), -math.inf, device=device)
        if problem.sinks is not None:
            wanted = problem.sinks.flatten() / unit
        for token in (0, 1, 2, 3, 6, 7, 8):  # and the first new token of the second sequence
            assert torch.allclose(lse.reshape(9, 8)[token], wanted, rtol=1e-6)
            assert not out.reshape(9, -1)[token].any()
