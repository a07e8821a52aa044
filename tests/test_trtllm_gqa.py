"""Grouped-query decode with the signature of TensorRT-LLM: rules of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError
from tests.problems.batch_decode import run, wrapper_of
from tests.problems.entry_points import ENTRY_POINTS, trtllm_gqa_arguments
from tests.problems.gqa import GqaCase, GqaProblem
from tests.problems.problem import E4M3

TRTLLM = ENTRY_POINTS["trtllm_gqa"]
SMALL = GqaCase(seq_lens=(70, 3), q_len=2, sink=3.0)


def trtllm(problem: GqaProblem, query: torch.Tensor, out_dtype: torch.dtype | None) -> Any:
    """Return the output of a query in a dtype."""
    return TRTLLM.call(problem, query=query, out=None, out_dtype=out_dtype)


def planned(problem: GqaProblem, query: torch.Tensor, out_dtype: torch.dtype | None) -> Any:
    """Return the same of batch decode."""
    wrapper = wrapper_of(problem, q_data_type=query.dtype, o_data_type=out_dtype)
    return run(wrapper, problem, q=query)


class TestTrtllmGqa:
    """Rules of ``trtllm_batch_decode_with_kv_cache``, on the device of the fixture."""

    @pytest.mark.parametrize(
        "facts",
        [
            {"q_len": 3, "mask": "random"},
            {"q_lens": (1, 0), "window": 20},
            {"q_lens": (3, 2), "mask": "random"},
            {"kv": "e4m3", "out_dtype": E4M3, "output_scale": 0.5},
            {"kv": "nvfp4", "o_scale": 0.5, "layout": "HND"},
            {"cache_layout": "stacked", "layout": "HND"},
        ],
        ids=str,
    )
    def test_calls_that_servers_make(self, facts: dict[str, Any], device: str) -> None:
        """Drafts, ragged queries, quantized caches and both layouts are right, with the LSE."""
        problem = GqaCase(seq_lens=(70, 3), sink=3.0, **facts).build(device)

        problem.check(*TRTLLM.call(problem, return_lse=True))

    def test_the_default_layout_has_heads_before_tokens(self, device: str) -> None:
        """`kv_layout` is HND unless it is passed."""
        problem = GqaCase(seq_lens=(70, 3), layout="HND").build(device)
        arguments = trtllm_gqa_arguments(problem)
        del arguments["kv_layout"]

        problem.check(TRTLLM.function(**arguments))

    def test_an_lse_tensor_is_written_without_return_lse(self, device: str) -> None:
        """`lse` without `return_lse` is written, as in FlashInfer."""
        problem = SMALL.build(device)
        lse = torch.full((4, 8), math.nan, device=device)

        problem.check(TRTLLM.call(problem, lse=lse), lse)

    def test_a_new_output_has_the_dtype_that_is_asked_for(self, device: str) -> None:
        """`out_dtype` is that of the query, or e4m3 from a cache of e4m3."""
        case = GqaCase(seq_lens=(70, 3), kv="e4m3", out_dtype=E4M3, output_scale=0.5)
        problem = case.build(device)

        problem.check(TRTLLM.call(problem, out=None, out_dtype=E4M3))

    @pytest.mark.parametrize("call", [trtllm, planned])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3], ids=str)
    def test_an_e4m3_query(self, dtype: torch.dtype, call: Any, device: str) -> None:
        """It gives the bits of the same query in 16 bits; its output is e4m3 by default."""
        problem = GqaCase(seq_lens=(70, 3), kv="e4m3").build(device)
        query, said = problem.query.to(E4M3), None if dtype is E4M3 else dtype

        out = call(problem, query, said)

        assert out.dtype is dtype
        wide = query.to(torch.bfloat16 if said is None else said)
        assert torch.equal(out.float(), call(problem, wide, dtype).float())

    def test_an_e4m3_query_without_storage(self, device: str) -> None:
        """It is rejected before it is converted."""
        problem = GqaCase(seq_lens=(70, 3), kv="e4m3").build(device)
        query = problem.query.to(E4M3)
        query.untyped_storage().resize_(0)

        with pytest.raises(ArgumentError, match=r"query: .* got a tensor without storage"):
            TRTLLM.call(problem, query=query, out=None)

    def test_a_scale_with_a_factor_of_log2_e(self, device: str) -> None:
        """`bmm1_scale_log2` is used instead of `bmm1_scale`."""
        problem = SMALL.build(device)
        scale = torch.tensor([problem.case.scale * math.log2(math.e)], device=device)

        problem.check(TRTLLM.call(problem, bmm1_scale=7.0, bmm1_scale_log2=scale))

    def test_sinks_in_a_list(self, device: str) -> None:
        """A list of one tensor is that tensor."""
        problem = SMALL.build(device)

        problem.check(TRTLLM.call(problem, sinks=[problem.sinks]))

    @pytest.mark.parametrize(
        ("keyword", "value"),
        [
            ("backend", "xqa"),
            ("backend", "trtllm-gen"),
            ("skip_softmax_threshold_scale_factor", 1000.0),
            ("bf16q_fp8kv_transform_mode", "k_only"),
            ("multi_ctas_kv_counter_buffer", "a tensor"),
            ("max_q_len", 9),
            ("o_scale", None),
        ],
    )
    def test_keywords_that_change_no_bit(self, keyword: str, value: object, device: str) -> None:
        """Names of one semantics, hints and scratch change no bit."""
        problem = SMALL.build(device)
        if value == "a tensor":
            value = torch.zeros(3, dtype=torch.uint8, device=device)

        assert torch.equal(TRTLLM.run(problem, **{keyword: value}), TRTLLM.run(problem))

    def test_one_query_token_without_a_number(self, device: str) -> None:
        """`q_len_per_req=None` without offsets is 1."""
        problem = GqaCase(seq_lens=(70, 3)).build(device)

        problem.check(TRTLLM.call(problem, q_len_per_req=None))
