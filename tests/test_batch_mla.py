"""BatchMLA on the CPU: semantics of the wrapper, and what it rejects."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError, CaptureError, UnsupportedError
from mlagen.mla import wrapper as batch_wrapper
from mlagen.mla.wrapper import BatchMLAPagedAttentionWrapper
from tests.batch_mla_cases import plan_arguments, run, wrapper_of
from tests.batch_mla_semantics import SOME, BatchMlaSemantics
from tests.mla_rows import E4M3
from tests.planless_semantics import PlanlessSemantics


class TestOnTheCpu(BatchMlaSemantics):
    """Semantics of planned runs, without a GPU."""

    device = "cpu"


class TestPlanlessOnTheCpu(PlanlessSemantics):
    """Semantics of runs without a plan, without a GPU."""

    device = "cpu"


def test_the_signatures_are_those_of_flashinfer() -> None:
    """Names, order and defaults of the parameters equal FlashInfer's."""
    wrapper = BatchMLAPagedAttentionWrapper
    functions = (wrapper.__init__, wrapper.plan, wrapper.run)

    shown = [
        " ".join(
            name if p.default is p.empty else f"{name}={p.default!r}"
            for name, p in list(inspect.signature(function).parameters.items())[1:]
        )
        for function in functions
    ]

    assert shown == [
        (
            "float_workspace_buffer use_cuda_graph=False qo_indptr=None kv_indptr=None "
            "kv_indices=None kv_len_arr=None backend='auto'"
        ),
        (
            "qo_indptr kv_indptr kv_indices kv_len_arr num_heads head_dim_ckv head_dim_kpe "
            "page_size causal sm_scale q_data_type kv_data_type use_profiler=False"
        ),
        (
            "q_nope q_pe ckv_cache kpe_cache out=None lse=None return_lse=False "
            "profiler_buffer=None kv_len=None page_table=None return_lse_base_on_e=False "
            "o_scale=None ckv_scale=None ckv_scale_arr=None kpe_scale=None"
        ),
    ]
    keyword_only = [
        name
        for name, p in inspect.signature(wrapper.run).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    ]
    assert keyword_only == ["ckv_scale", "ckv_scale_arr", "kpe_scale"]


def ints(*numbers: int) -> torch.Tensor:
    """Return int32 numbers."""
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_data_type": torch.float32}, "MLA kv_data_type"),
        ({"kv_data_type": [1]}, r"MLA kv_data_type: expected torch.* got \[1\]"),
        ({"q_data_type": [1]}, r"q_data_type: expected torch.bfloat16 \(kv_data_type\), got \[1\]"),
        ({"head_dim_kpe": -1}, "head_dim_kpe must be >= 0"),
        ({"kv_data_type": E4M3, "q_data_type": torch.float16}, "q_data_type=torch.bfloat16"),
        (
            {"kv_data_type": E4M3, "head_dim_ckv": 256},
            r"head_dim_ckv=512 and head_dim_kpe in \(0, 64\)",
        ),
        (
            {"kv_data_type": E4M3, "head_dim_kpe": 32},
            r"head_dim_ckv=512 and head_dim_kpe in \(0, 64\)",
        ),
        ({"q_data_type": torch.float16}, r"q_data_type: expected torch.bfloat16 \(kv_data_type\)"),
        ({"num_heads": 0}, "num_heads: expected an int, 1 or more, got 0"),
        ({"num_heads": 257}, "num_heads: expected 256 or less, got 257"),
        ({"page_size": 0}, "page_size: expected an int, 1 or more, got 0"),
        ({"sm_scale": "1"}, "sm_scale: expected a float, got '1'"),
        ({"kv_indices": [1]}, "kv_indices: expected a torch.Tensor, got list"),
        ({"kv_len_arr": torch.zeros(4)}, "kv_len_arr.dtype: expected torch.int32 or torch.uint32"),
        ({"kv_len_arr": ints(1)[None]}, "kv_len_arr.ndim: expected 1, got 2"),
        ({"kv_len_arr": ints(1, 2, 3, 4, 5)}, r"qo_indptr.shape: expected \[6\] or longer \(batch"),
        ({"kv_indptr": ints(0, 1)}, r"kv_indptr.shape: expected \[5\] or longer \(batch of kv_len"),
        ({"qo_indptr": ints(0, 2, 1, 6, 6)}, r"qo_indptr\[2\]: expected 2 or more"),
        ({"qo_indptr": ints(1, 2, 3, 6, 6)}, r"qo_indptr\[0\]: expected 0, got 1"),
        ({"kv_indptr": ints(0, 3, 2, 11, 12)}, r"kv_indptr\[2\]: expected 3 or more"),
        ({"kv_indptr": ints(0, 3, 4, 11, 99)}, r"kv_indptr\[-1\]: expected 20 \(page ids\)"),
        ({"kv_len_arr": ints(40, -7, 100, 5)}, r"kv_len_arr\[1\]: expected 0 or more, got -7"),
        (
            {"kv_len_arr": ints(49, 7, 100, 5)},
            r"kv_len_arr\[0\]: expected 48 \(capacity of its block",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_a_plan_that_breaks_a_rule_is_rejected(changes: dict[str, Any], message: str) -> None:
    """The error names the broken rule, and the previous plan remains."""
    problem = SOME.build("cpu")
    wrapper = wrapper_of(problem)

    with pytest.raises(ArgumentError, match=message):
        wrapper.plan(**plan_arguments(problem, **changes))

    problem.check(run(wrapper, problem))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim_ckv": 128}, r"no MLA decode kernel .* \(128, 64\)"),
        ({"use_profiler": True}, "Profiler is enabled"),
    ],
    ids=["head dimensions", "profiler"],
)
def test_an_unsupported_plan_is_rejected(changes: dict[str, Any], message: str) -> None:
    """A valid but unsupported plan raises another error."""
    problem = SOME.build("cpu")

    with pytest.raises(UnsupportedError, match=message):
        wrapper_of(problem, **changes)


def test_a_run_without_a_plan_is_rejected() -> None:
    """Without a plan, and without lengths and a table, the error names the call to make."""
    problem = SOME.build("cpu")
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0))

    with pytest.raises(ArgumentError, match=r"expected plan\(\) to be called first"):
        run(wrapper, problem, kv_len=problem.seq_lens)


def test_a_plan_is_not_for_every_backend() -> None:
    """The planless backend rejects a plan, and an unknown backend is rejected at once."""
    problem = SOME.build("cpu")

    with pytest.raises(ArgumentError, match="backend: expected one of auto, fa2, fa3 to plan for"):
        wrapper_of(problem, backend="cutlass")
    with pytest.raises(ArgumentError, match="backend: expected one of auto, fa2, fa3, cutlass"):
        wrapper_of(problem, backend="fa4")


def with_buffers(
    page_ids: int,
) -> tuple[BatchMLAPagedAttentionWrapper, dict[str, torch.Tensor]]:
    """Return a wrapper for graphs of four requests, and its buffers."""
    sizes = {"qo_indptr": 5, "kv_indptr": 5, "kv_indices": page_ids, "kv_len_arr": 4}
    buffers = {name: torch.full((size,), -1, dtype=torch.int32) for name, size in sizes.items()}
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(0),
        True,
        buffers["qo_indptr"],
        buffers["kv_indptr"],
        buffers["kv_indices"],
        buffers["kv_len_arr"],
    )
    return wrapper, buffers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_len_arr": ints(1, 2, 3)}, r"kv_len_arr.shape: expected \[4\] \(its buffer"),
        ({"kv_indices": ints(*range(30))}, r"kv_indices.shape\[0\]: expected 25 \(its buffer\)"),
    ],
    ids=["another batch", "too many pages"],
)
def test_a_plan_that_its_buffers_cannot_hold_is_rejected(
    changes: dict[str, Any], message: str
) -> None:
    """Graph buffers fix the batch size, and the page ids must fit."""
    problem = SOME.build("cpu")
    wrapper, buffers = with_buffers(page_ids=25)
    if "kv_len_arr" in changes:
        changes = {**changes, "qo_indptr": ints(0, 2, 3, 6), "kv_indptr": ints(0, 3, 4, 11)}

    with pytest.raises(ArgumentError, match=message):
        wrapper.plan(**plan_arguments(problem, **changes))

    assert all((buffer == -1).all() for buffer in buffers.values())


def test_plans_are_copied_into_the_buffers_of_a_graph() -> None:
    """With buffers a run reads the plan from them, the page ids from their start."""
    problem = SOME.build("cpu")
    wrapper, buffers = with_buffers(page_ids=40)

    wrapper.plan(**plan_arguments(problem))

    problem.check(run(wrapper, problem))
    assert torch.equal(buffers["kv_len_arr"], problem.seq_lens)
    assert (buffers["kv_indices"][len(problem.block_tables) :] == -1).all()


def test_a_run_is_captured_from_buffers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture rejects metadata that the next plan frees."""
    monkeypatch.setattr(batch_wrapper, "is_capturing", lambda _: True)
    problem = SOME.build("cpu")
    out = torch.full_like(problem.query, 7.0)

    with pytest.raises(CaptureError, match="use_cuda_graph: expected True with its four buffers"):
        run(wrapper_of(problem), problem, out=out)

    assert (out == 7.0).all()
    wrapper, _ = with_buffers(page_ids=40)
    wrapper.plan(**plan_arguments(problem))
    problem.check(run(wrapper, problem, out=out))


def test_buffers_of_a_graph_must_be_given() -> None:
    """Graph mode requires its buffers."""
    with pytest.raises(ArgumentError, match="qo_indptr: expected a "):
        BatchMLAPagedAttentionWrapper(torch.empty(0), use_cuda_graph=True)
