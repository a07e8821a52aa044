"""What BatchMLA plans of metadata objects reject, and runs that differ from their plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from tests.problems.batch_mla import SOME, new_wrapper, run, wrapper_of
from tests.problems.problem import E4M3
from tests.test_batch_mla_plans import packed_arguments, split_plan


def test_block_tables_of_a_graph_are_on_the_device() -> None:
    """A captured graph would read a copy of metadata on the CPU, so that it is rejected."""
    problem = SOME.build("cpu")
    _, dense, settings = split_plan(problem)
    workspace = torch.empty(0, device="meta")
    wrapper = BatchMLAPagedAttentionWrapper(workspace, use_cuda_graph=True)

    with pytest.raises(ArgumentError, match=r"cum_seq_lens_q.device: expected meta, where a capt"):
        wrapper.plan(metadata=MLAPlanMetadata.dense(**dense), **settings)


def ints(*numbers: int) -> torch.Tensor:
    """Return int32 numbers."""
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tables": ints(1)}, "block_tables.ndim: expected 2, got 1"),
        ({"block_tables": ints(1)[None]}, r"block_tables.shape\[0\]: expected 4 \(batch of seq_l"),
        ({"cum_seq_lens_q": ints(0, 1)}, r"cum_seq_lens_q.shape: expected \[5\] or longer \(batch"),
        ({"cum_seq_lens_q": ints(0, 2, 1, 6, 6)}, r"cum_seq_lens_q\[2\]: expected 2 or more"),
        ({"seq_lens": ints(40, 7, 9999, 5)}, r"seq_lens\[2\]: expected \d+ \(capacity of its blo"),
        ({"seq_lens": None}, "seq_lens: expected a torch.Tensor, as cum_seq_lens_q, block_tables,"),
        ({"seq_lens": torch.zeros(4)}, "seq_lens.dtype: expected torch.int32 or torch.uint32"),
        ({"max_q_len": 2}, r"max_q_len: expected 3 or more \(cum_seq_lens_q\), got 2"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_block_tables_that_break_a_rule_are_rejected(changes: dict[str, Any], message: str) -> None:
    """The error names the argument of the dense form."""
    problem = SOME.build("cpu")
    _, dense, settings = split_plan(problem)

    with pytest.raises(ArgumentError, match=message):
        new_wrapper("cpu").plan(metadata=MLAPlanMetadata(**{**dense, **changes}), **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": (1,)}, "metadata: expected an MLAPlanMetadata, got tuple"),
        ({"metadata": None}, "qo_indptr: expected a torch.Tensor, as qo_indptr, kv_indptr, kv_ind"),
        (
            {"kv_indptr": ints(0)},
            "metadata: expected None with metadata by name, got kv_indptr too",
        ),
        (
            {"metadata": None, "qo_indptr": ints(0), "seq_lens": ints(0)},
            "metadata: expected page i",
        ),
        (
            {"metadata": MLAPlanMetadata(*(ints(0),) * 4, max_q_len=3)},
            "max_q_len: expected None without block_tables, got 3",
        ),
        ({"lse_mode": "base10"}, "lse_mode: expected one of none, base2, basee, got 'base10'"),
        ({"query_layout": "wide"}, "query_layout: expected one of packed, split, got 'wide'"),
        ({"kv_cache_layout": "wide"}, "kv_cache_layout: expected one of packed, split"),
        ({"output_scale": "per-row"}, "output_scale: expected one of none, per-tensor"),
        ({"scale_mode": "kv-per-tensor"}, "scale_mode: expected another for a cache of the query"),
        ({"output_dtype": E4M3}, r"output_dtype: expected torch.bfloat16 \(output_scale 'none'\)"),
        ({"output_scale": "per-tensor"}, "output_dtype: expected torch.float8_e4m3fn or torch.flo"),
        ({"output_dtype": 1}, "output_dtype: expected a torch.dtype, got 1"),
        ({"scale_mode": "bmm-tensor"}, "scale_mode: expected another than 'bmm-tensor'"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_a_plan_cannot_declare(changes: dict[str, Any], message: str) -> None:
    """The error names the keyword, and the previous plan remains."""
    problem = SOME.build("cpu")
    csr, _, settings = split_plan(problem)
    wrapper = wrapper_of(problem)
    is_unsupported = "bmm-tensor" in message
    given = {"metadata": MLAPlanMetadata.csr(**csr)} | settings | changes

    with pytest.raises(UnsupportedError if is_unsupported else ArgumentError, match=message):
        wrapper.plan(**given)

    problem.check(run(wrapper, problem))


def test_forms_of_different_requests_are_rejected() -> None:
    """Both forms on the CPU must have equal offsets and lengths."""
    problem = SOME.build("cpu")
    csr, dense, settings = split_plan(problem)
    dense["seq_lens"] = dense["seq_lens"] - 1

    with pytest.raises(ArgumentError, match="seq_lens: expected kv_len_arr, as both forms descr"):
        new_wrapper("cpu").plan(metadata=MLAPlanMetadata.dual(**csr, **dense), **settings)


FP8_OUT = {"output_scale": "per-tensor", "output_dtype": E4M3}


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        ({}, {"return_lse": True}, "LSE mode mismatch: expected none .of plan., got base2"),
        ({}, {"return_lse_base_on_e": True}, "LSE mode mismatch: expected none .* got basee"),
        ({"lse_mode": "base2"}, {}, "LSE mode mismatch: expected base2 .of plan., got none"),
        (
            {"lse_mode": "basee"},
            {"return_lse": True},
            "LSE mode mismatch: expected basee .of plan., got base2",
        ),
        ({}, {"sinks": torch.zeros(6)}, "sinks mismatch: expected use_sinks=False"),
        ({"use_sinks": True}, {}, "sinks mismatch: expected use_sinks=True"),
        ({}, {"skip_softmax_threshold_scale_factor": 0.5}, "skip_softmax mismatch: expected False"),
        ({"skip_softmax": True}, {}, "skip_softmax mismatch: expected True .of plan., got None"),
        ({}, {"bmm1_scale": 1.0, "bmm2_scale": 1.0}, "scale mode mismatch: expected default"),
        ({"scale_mode": "bmm-scalar"}, {}, "scale mode mismatch: expected bmm-scalar"),
        (
            {"scale_mode": "bmm-scalar"},
            {"bmm1_scale": 1.0},
            "must be provided together: expected b",
        ),
        (
            {"skip_softmax": True},
            {"skip_softmax_threshold_scale_factor": "1"},
            "skip_softmax_threshold_scale_factor: expected",
        ),
        ({}, {"o_scale": 1.0}, "o_scale is only supported with the cutlass backend"),
        (FP8_OUT, {}, "o_scale mismatch: expected per-tensor .of plan., got None"),
        (FP8_OUT, {"o_scale": 1.0}, "out tensor must be provided when o_scale is given"),
        (FP8_OUT, {"o_scale": -1.0}, "o_scale must be a finite positive value"),
        (
            FP8_OUT,
            {"o_scale": 1.0, "out": torch.zeros(6, 6, 512).to(torch.float8_e5m2)},
            "out.dtype: expected torch.float8_e4m3fn, got torch.float8_e5m2",
        ),
        ({}, {"kv_len": ints(1)}, "page_table: expected a torch.Tensor, got NoneType"),
        ({}, {"query": torch.zeros(1)}, "query: expected None with its parts, got both"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_a_run_that_its_plan_does_not_declare_is_rejected(
    plan: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    """The error names the difference from the plan, in FlashInfer's words, at every run."""
    problem = SOME.build("cpu")
    csr, _, settings = split_plan(problem)
    wrapper = new_wrapper("cpu")
    wrapper.plan(metadata=MLAPlanMetadata.csr(**csr), **settings, **plan)

    for _ in range(2):
        with pytest.raises(ArgumentError, match=message):
            run(wrapper, problem, **changes)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (torch.zeros(6, 6, 512).bfloat16(), r"query.shape\[-1\]: expected 576 \(head_dim_ckv \+ "),
        (torch.zeros(6, 576).bfloat16(), "query.ndim: expected 3, got 2"),
        (
            (torch.zeros(1),),
            "query: expected a torch.Tensor, a pair of its parts, or a pair of both",
        ),
        (
            ((1, 2), (3, 4)),
            "query: expected a torch.Tensor, a pair of its parts, or a pair of both",
        ),
    ],
    ids=["width", "dimensions", "one part", "two pairs"],
)
def test_a_query_of_no_form_is_rejected(query: Any, message: str) -> None:
    """The error names the keyword."""
    problem = SOME.build("cpu")
    cache = packed_arguments(problem)["kv_cache"]

    with pytest.raises(ArgumentError, match=message):
        wrapper_of(problem).run(query=query, kv_cache=cache)
