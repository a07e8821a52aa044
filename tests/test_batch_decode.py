"""Planned grouped-query decode: plans, runs and buffers of CUDA graphs."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.decode import BatchDecodeWithPagedKVCacheWrapper
from mlagen.errors import ArgumentError, CaptureError
from mlagen.gqa import wrapper as wrapper_module
from mlagen.gqa.batch_plan import PageMetadata, _consistent_layout
from tests.problems.batch_decode import (
    decode_planned,
    graph_buffers,
    plan_arguments,
    run,
    run_arguments,
    workspace_for,
    wrapper_of,
)
from tests.problems.gqa import KINDS, GqaCase, gqa_case
from tests.problems.problem import E4M3

SMALL = GqaCase(seq_lens=(70, 3, 0, 33), sink=3.0)
DRAFTS = GqaCase(seq_lens=(70, 3, 33), q_len=3)


class TestBatchDecode:
    """Rules of the wrapper, on the device of the fixture."""

    @pytest.mark.parametrize("lens", [(70, 3, 0), (5000, 3)], ids=["whole", "split"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_kinds(self, kind: str, lens: tuple[int, ...], device: str) -> None:
        """Output and LSE of every kind of cache are right."""
        problem = gqa_case(kind, seq_lens=lens, head_dim=64, kv_heads=1, sink=3.0).build(device)

        problem.check(*decode_planned(problem))

    @pytest.mark.parametrize(
        "facts",
        [
            {"window": 20},
            {"q_len": 3, "window": 20},
            {"q_len": 3, "causal": False},
            {"layout": "HND", "page_size": 64},
            {"cache_layout": "stacked", "layout": "HND"},
            {"page_size": 1},
        ],
        ids=str,
    )
    def test_plans(self, facts: dict[str, Any], device: str) -> None:
        """Windows, several query tokens, masks, layouts and page sizes are those of the plan."""
        problem = GqaCase(seq_lens=(70, 3, 33), sink=3.0, **facts).build(device)

        problem.check(*decode_planned(problem))

    @pytest.mark.parametrize("metadata", ["cpu", None], ids=["on the CPU", "on the device"])
    def test_a_plan_copies_the_metadata(self, metadata: str | None, device: str) -> None:
        """The caller may overwrite the metadata after the plan."""
        problem = SMALL.build(device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace_for(problem))
        given = plan_arguments(problem, metadata=metadata)
        wrapper.plan(**given)
        for name in ("indptr", "indices", "last_page_len"):
            given[name].fill_(0)

        problem.check(run(wrapper, problem))

    def test_a_wrapper_can_replan(self, device: str) -> None:
        """A run computes the requests of the latest plan."""
        first, second = SMALL.build(device), replace(SMALL, seq_lens=(5, 90), seed=1).build(device)
        wrapper = wrapper_of(first)
        first.check(run(wrapper, first))

        wrapper.plan(**plan_arguments(second))

        second.check(run(wrapper, second))

    def test_lengths_of_their_own(self, device: str) -> None:
        """`seq_lens` of a plan counts, whatever `last_page_len` says."""
        problem = SMALL.build(device)
        tails = torch.ones(4, dtype=torch.int32, device=device)

        wrapper = wrapper_of(problem, seq_lens=problem.seq_lens, last_page_len=tails)

        problem.check(run(wrapper, problem))

    def test_scales_multiply(self, device: str) -> None:
        """Scales of query and keys multiply the scores, as floats and as tensors."""
        problem = SMALL.build(device)
        wrapper = wrapper_of(problem, sm_scale=problem.case.scale / 6)
        scale = torch.tensor(3.0, device=device)

        problem.check(run(wrapper, problem, q_scale=2.0, k_scale=scale))

    def test_the_default_scale(self, device: str) -> None:
        """`sm_scale=None` is `head_dim ** -0.5`."""
        problem = GqaCase(seq_lens=(70, 3), score_scale=128**-0.5).build(device)

        problem.check(run(wrapper_of(problem, sm_scale=None), problem))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3], ids=str)
    def test_an_e4m3_query(self, dtype: torch.dtype, device: str) -> None:
        """It gives the bits of the same query in 16 bits; its output is e4m3 by default."""
        problem = GqaCase(seq_lens=(70, 3), kv="e4m3").build(device)
        query, said = problem.query.to(E4M3), None if dtype is E4M3 else dtype
        wide = query.to(torch.bfloat16 if said is None else said)

        out = run(wrapper_of(problem, q_data_type=E4M3, o_data_type=said), problem, q=query)

        assert out.dtype is dtype
        planned = wrapper_of(problem, q_data_type=wide.dtype, o_data_type=dtype)
        assert torch.equal(out.float(), run(planned, problem, q=wide).float())

    def test_given_outputs(self, device: str) -> None:
        """`out` and `lse` are written and returned; `lse` without `return_lse` is written."""
        problem = SMALL.build(device)
        wrapper = wrapper_of(problem)
        out, lse = problem.new_out(), torch.full((4, 8), math.nan, device=device)

        result = run(wrapper, problem, out=out, lse=lse)

        assert result is out
        problem.check(out, lse)
        out, lse = problem.new_out(), torch.full((4, 8), math.nan, device=device)
        both = wrapper.run(**run_arguments(problem, out=out, lse=lse, return_lse=True))
        assert isinstance(both, tuple)
        assert both[0] is out
        assert both[1] is lse
        problem.check(out, lse)

    def test_what_a_run_has_of_its_own(self, device: str) -> None:
        """`window_left` and `q_len_per_req` of a run replace the plan's, for that run alone."""
        problem, planned = (case.build(device) for case in (replace(DRAFTS, window=20), SMALL))
        own = {"window_left": 19, "q_len_per_req": 3}

        problem.check(run(wrapper_of(problem), problem, **own))
        wrapper = wrapper_of(problem, window_left=-1, q_len_per_req=1)
        for _ in range(2):
            problem.check(run(wrapper, problem, **own))

        wrapper.plan(**plan_arguments(planned))
        planned.check(run(wrapper, planned))

    @pytest.mark.parametrize("backend", ["auto", "fa2", "fa3", "trtllm-gen", "cute-dsl", "cudnn"])
    def test_backends_are_names_of_one_semantics(self, backend: str, device: str) -> None:
        """Every backend gives the same bits."""
        problem = SMALL.build(device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace_for(problem), backend=backend)
        wrapper.plan(**plan_arguments(problem))

        out = run(wrapper, problem, skip_softmax_threshold_scale_factor=9.0)

        assert torch.equal(out, decode_planned(problem)[0])


def test_lengths_and_offsets_stay_within_the_page_ids() -> None:
    """Whatever a device holds, a plan gives the kernels offsets and lengths that cannot fault."""
    given = PageMetadata(
        indptr=torch.tensor([-5, 2, 1, 1 << 30], dtype=torch.int32),
        indices=torch.arange(4, dtype=torch.int32),
        last_page_len=torch.tensor([1 << 30, 3, 5], dtype=torch.int32),
    )

    offsets, lengths = _consistent_layout(given, None, 16, torch.device("cpu"))

    assert offsets.tolist() == [0, 2, 1, 4]
    assert lengths.tolist() == [32, 0, 37]


def _wrapper(buffers: dict[str, Any]) -> BatchDecodeWithPagedKVCacheWrapper:
    return BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), use_cuda_graph=True, **buffers)


def test_plans_are_copied_into_the_buffers_of_a_graph() -> None:
    """Runs read the page ids in the buffer, and a plan writes all three."""
    problem = SMALL.build("cpu")
    buffers = graph_buffers(problem)
    wrapper = _wrapper(buffers)
    given = plan_arguments(problem)

    wrapper.plan(**given)

    problem.check(run(wrapper, problem))
    for name in ("indptr", "indices", "last_page_len"):
        assert torch.equal(buffers[f"paged_kv_{name}_buffer"][: len(given[name])], given[name])
    second = replace(SMALL, seq_lens=(3, 0, 70, 20), seed=1).build("cpu")
    wrapper.plan(**plan_arguments(second))
    second.check(run(wrapper, second))


def test_replans_of_a_graph_keep_the_memory_that_runs_read() -> None:
    """A captured run reads offsets, page ids and lengths at the same addresses."""
    problem = SMALL.build("cpu")
    wrapper = _wrapper(graph_buffers(problem))
    addresses = []
    for _ in range(2):
        wrapper.plan(**plan_arguments(problem))
        assert wrapper._plan is not None
        addresses.append([tensor.data_ptr() for tensor in wrapper._plan.tensors])

    assert addresses[0] == addresses[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": torch.zeros(99, dtype=torch.int32)}, "indices.shape[0]: expected "),
        (
            {
                "last_page_len": torch.ones(3, dtype=torch.int32),
                "indptr": torch.zeros(4, dtype=torch.int32),
            },
            "last_page_len.shape[0]: expected 4 (requests of the buffers), got 3",
        ),
        ({"q_len_per_req": 2}, "q_len_per_req: expected 1 (of the first plan), got 2"),
    ],
    ids=["too many pages", "another batch", "another q_len_per_req"],
)
def test_a_plan_that_its_buffers_cannot_hold_is_rejected(
    changes: dict[str, Any], message: str
) -> None:
    """The batch and q_len_per_req are fixed, and the previous plan stays."""
    problem = SMALL.build("cpu")
    wrapper = _wrapper(graph_buffers(problem))
    wrapper.plan(**plan_arguments(problem))

    with pytest.raises(ArgumentError, match=re.escape(message)):
        wrapper.plan(**plan_arguments(problem, **changes))

    problem.check(run(wrapper, problem))


def test_a_run_is_captured_from_buffers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured run of a plan without buffers would read freed memory."""
    problem = SMALL.build("cpu")
    wrapper, planned = _wrapper(graph_buffers(problem)), wrapper_of(problem)
    wrapper.plan(**plan_arguments(problem))
    monkeypatch.setattr(wrapper_module, "is_capturing", lambda _: True)

    problem.check(run(wrapper, problem))
    with pytest.raises(CaptureError, match="use_cuda_graph: expected True with its three buffers"):
        run(planned, problem)
