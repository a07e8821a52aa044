"""Grouped-query decode with the signature of TensorRT-LLM: rules of its own."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import mlagen.decode
from mlagen.errors import ArgumentError, UnsupportedError
from tests.problems.entry_points import ENTRY_POINTS, trtllm_gqa_arguments
from tests.problems.gqa import GqaCase
from tests.problems.problem import E4M3

TRTLLM = ENTRY_POINTS["trtllm_gqa"]
SMALL = GqaCase(seq_lens=(70, 3), q_len=2, sink=3.0)


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

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3], ids=str)
    def test_an_e4m3_query(self, dtype: torch.dtype, device: str) -> None:
        """It gives the bits of the same query in 16 bits; its output is e4m3 by default."""
        problem = GqaCase(seq_lens=(70, 3), kv="e4m3").build(device)
        query, said = problem.query.to(E4M3), None if dtype is E4M3 else dtype
        wide = query.to(torch.bfloat16 if said is None else said)

        out = TRTLLM.call(problem, query=query, out=None, out_dtype=said)

        assert out.dtype is dtype
        expected = TRTLLM.call(problem, query=wide, out=None, out_dtype=dtype)
        assert torch.equal(out.float(), expected.float())

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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_dtype": "nvfp4"}, "out_dtype: not implemented, expected a torch.dtype, got 'nvfp4'"),
        ({"o_sf_scale": 1.0}, "o_sf_scale: not implemented, expected None, got 1.0"),
        ({"o_sf_vec_size": 16}, "o_sf_vec_size: not implemented, expected None, got 16"),
        (
            {"uses_shared_paged_kv_idx": False},
            "uses_shared_paged_kv_idx: not implemented, expected True, got False",
        ),
        (
            {"enable_block_sparse_attention": True},
            "enable_block_sparse_attention: not implemented, expected False, got True",
        ),
        ({"cp_world": 2}, "cp_world: not implemented, expected 1, got 2"),
        ({"cp_rank": 1}, "cp_rank: not implemented, expected 0, got 1"),
        (
            {"causal_seqlens_kv_global": torch.zeros(2)},
            "causal_seqlens_kv_global: not implemented, expected None, got a tensor",
        ),
        (
            {"request_order": torch.zeros(2)},
            "request_order: not implemented, expected None, got a tensor",
        ),
        ({"request_order_plan": 1}, "request_order_plan: not implemented, expected None, got 1"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_no_kernel_serves_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    """The error names the keyword and what asks for nothing; no output is written."""
    problem = SMALL.build("cpu")
    out = problem.new_out(7.0)

    with pytest.raises(UnsupportedError, match=re.escape(message)):
        TRTLLM.call(problem, out=out, **changes)

    assert (out == 7.0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "cake"}, "backend: expected one of auto, xqa, trtllm-gen, got 'cake'"),
        ({"out": "a word"}, "out: expected a torch.Tensor, got str"),
        ({"out_dtype": "bf16"}, "out_dtype: expected a torch.dtype, got 'bf16'"),
        ({"out_dtype": torch.float16}, "out_dtype: expected torch.bfloat16 (dtype of query"),
        ({"bmm1_scale_log2": 1.0}, "bmm1_scale_log2: expected a torch.Tensor, got float"),
        ({"cp_world": "one"}, "cp_world: expected an int, "),
        ({"bf16q_fp8kv_transform_mode": "v"}, "expected one of k_only, separate_kv, got 'v'"),
        ({"skip_softmax_threshold_scale_factor": "no"}, "_factor: expected a float, got 'no'"),
        ({"multi_ctas_kv_counter_buffer": 1}, "_buffer: expected a torch.Tensor, got int"),
        ({"max_q_len": 1.5}, "max_q_len: expected an int, "),
        ({"sinks": []}, "sinks: expected a list of one tensor, got 0"),
        ({"out": torch.zeros(4, 8, 128).half(), "out_dtype": torch.bfloat16}, "out.dtype: exp"),
        (
            {"cum_seq_lens_q": torch.tensor([0, 2, 4], dtype=torch.int32)},
            "max_q_len: expected an int (required with cum_seq_lens_q), got None",
        ),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_invalid_keywords_are_rejected(changes: dict[str, Any], message: str) -> None:
    """A keyword of a wrong type or an unknown name is named with its rule."""
    problem = SMALL.build("cpu")

    with pytest.raises(ArgumentError, match=re.escape(message)):
        TRTLLM.call(problem, **changes)


def test_the_name_is_that_of_flashinfer() -> None:
    """The entry point is in ``mlagen.decode``."""
    assert "trtllm_batch_decode_with_kv_cache" in mlagen.decode.__all__
