"""Planned grouped-query decode: plans, runs, other names of them, and plans for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from mlagen.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from mlagen.errors import ArgumentError
from mlagen.gqa.plan import within_page_ids
from mlagen.planned.metadata import Requests
from tests.problems.batch_decode import (
    decode_planned,
    forward_arguments,
    graph_buffers,
    plan_arguments,
    run,
    run_arguments,
    workspace_for,
    wrapper_of,
)
from tests.problems.gqa import GqaCase, GqaProblem
from tests.problems.problem import E4M3, ints

SMALL = GqaCase(seq_lens=(70, 3, 0, 33), sink=3.0)
PLAIN = replace(SMALL, sink=None)  # as a forward takes it
DRAFTS = GqaCase(seq_lens=(70, 3, 33), q_len=3)


def _fast_plan_arguments(problem: GqaProblem, **changes: Any) -> dict[str, Any]:
    given = plan_arguments(problem)
    for name in ("o_data_type", "is_causal", "head_dim_vo", "use_token_head_sf"):
        given.pop(name, None)
    return given | changes


def _forward(
    wrapper: BatchDecodeWithPagedKVCacheWrapper, problem: GqaProblem, **changes: Any
) -> torch.Tensor:
    out = wrapper.forward(**forward_arguments(problem, **changes))
    assert isinstance(out, torch.Tensor)
    return out


class TestBatchDecode:
    """Rules of the wrapper, on the device of the fixture."""

    def test_lengths_of_their_own(self, device: str) -> None:
        """`seq_lens` of a plan counts, whatever `last_page_len` says."""
        problem = SMALL.build(device)
        tails = torch.ones(4, dtype=torch.int32, device=device)

        wrapper = wrapper_of(problem, seq_lens=problem.seq_lens, last_page_len=tails)

        problem.check(run(wrapper, problem))

    @pytest.mark.parametrize("has_lengths", [False, True])
    def test_block_tables_of_a_plan(self, has_lengths: bool, device: str) -> None:
        """With trtllm-gen and cudnn their page ids replace `indices`; others ignore them."""
        problem = PLAIN.build(device)
        lengths = {"seq_lens": problem.seq_lens} if has_lengths else {}
        tables: dict[str, Any] = {"block_tables": problem.block_tables} | lengths
        given = plan_arguments(problem, **tables)
        given["indices"].fill_(-1)

        for backend in ("trtllm-gen", "cudnn"):
            scratch, layout = workspace_for(problem), problem.case.layout
            wrapper = BatchDecodeWithPagedKVCacheWrapper(scratch, layout, backend=backend)
            unsigned = given["last_page_len"].view(torch.uint32)
            wrapper.plan(**given | {"last_page_len": unsigned})
            problem.check(run(wrapper, problem))

        tables["block_tables"] = torch.full_like(problem.block_tables, -1)
        problem.check(run(wrapper_of(problem, **tables), problem))

    @pytest.mark.parametrize(
        ("shape", "dtype", "message"),
        [
            ((2, 4), torch.int64, "dtype: expected torch.int32 or .* got torch.int64"),
            ((8,), torch.int32, "ndim: expected 2, got 1"),
            ((3, 4), torch.int32, r"shape\[0\]: expected 2 \(batch of last_page_len\), got 3"),
            ((2, 1), torch.int32, r"shape\[1\]: expected 5 or more \(pages\), got 1"),
        ],
    )
    def test_block_tables_that_hold_no_pages(
        self, shape: tuple[int, ...], dtype: torch.dtype, message: str
    ) -> None:
        """They are rejected in one line."""
        problem = GqaCase(seq_lens=(70, 3)).build("cpu")
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace_for(problem), backend="cudnn")
        with pytest.raises(ArgumentError, match=rf"^block_tables\.{message}$"):
            wrapper.plan(**plan_arguments(problem, block_tables=torch.zeros(shape, dtype=dtype)))

    def test_scales_multiply(self, device: str) -> None:
        """Scales of query and keys multiply the scores, as floats and as tensors."""
        problem = SMALL.build(device)
        wrapper = wrapper_of(problem, sm_scale=problem.case.scale / 6)
        scale = torch.tensor(3.0, device=device)

        problem.check(run(wrapper, problem, q_scale=2.0, k_scale=scale))

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

    def test_the_default_scale(self, device: str) -> None:
        """`sm_scale=None` is `head_dim ** -0.5`, in a plan, and in a forward whatever its plan."""
        problem = GqaCase(seq_lens=(70, 3), score_scale=128**-0.5).build(device)

        problem.check(run(wrapper_of(problem, sm_scale=None), problem))
        problem.check(_forward(wrapper_of(problem, sm_scale=3.0), problem, sm_scale=None))

    def test_names_of_a_run_with_its_lse(self, device: str) -> None:
        """`run_return_lse` and `forward_return_lse` give output and LSE."""
        problem = PLAIN.build(device)
        wrapper = wrapper_of(problem)
        given = run_arguments(problem)

        problem.check(*wrapper.run_return_lse(given.pop("q"), given.pop("paged_kv_cache"), **given))
        problem.check(*wrapper.forward_return_lse(**forward_arguments(problem)))

    @pytest.mark.parametrize("planned", [1.0, 0.7])
    def test_a_forward_has_a_scale_of_its_own(self, planned: float, device: str) -> None:
        """`forward` multiplies by its `sm_scale`, and the runs after it by that of the plan."""
        problem = PLAIN.build(device)
        scale, q_scale = problem.case.scale, torch.tensor(2.0, device=device)
        wrapper = wrapper_of(problem, sm_scale=scale * planned)

        problem.check(_forward(wrapper, problem))
        problem.check(_forward(wrapper, problem, sm_scale=scale / 2, q_scale=q_scale))

        problem.check(run(wrapper, problem, q_scale=1 / planned))

    def test_a_forward_has_a_window_of_its_own(self, device: str) -> None:
        """A forward without a window attends to every token, whatever the plan says."""
        whole, window = (GqaCase(seq_lens=(70, 3), window=size).build(device) for size in (0, 20))
        wrapper = wrapper_of(window)

        whole.check(_forward(wrapper, whole))
        window.check(_forward(wrapper, window, window_left=19))

    def test_a_forward_has_a_soft_cap_of_its_own(self, device: str) -> None:
        """A forward or a run has the soft cap that it names, and forwards without one have none."""
        case = GqaCase(seq_lens=(70, 3), score_scale=1.0)
        plain, capped, other = (
            replace(case, soft_cap=soft_cap).build(device) for soft_cap in (0.0, 3.0, 20.0)
        )
        wrapper = wrapper_of(capped)

        capped.check(run(wrapper, capped))
        plain.check(_forward(wrapper, plain))
        other.check(_forward(wrapper, other, logits_soft_cap=20.0))
        plain.check(run(wrapper, plain, logits_soft_cap=0.0))
        other.check(run(wrapper, other, logits_soft_cap=20))
        capped.check(run(wrapper, capped))

    def test_a_workspace_can_be_replaced(self, device: str) -> None:
        """A run after `reset_workspace_buffer` uses the new scratch, and the plan stays."""
        problem = GqaCase(seq_lens=(5000, 3)).build(device)
        wrapper = wrapper_of(problem)
        scratch = workspace_for(problem)

        wrapper.reset_workspace_buffer(scratch, torch.empty(0, device=device))

        problem.check(run(wrapper, problem))
        assert device == "cpu" or not bool((scratch == 0xFF).all())

    def test_plans_that_servers_make_for_graphs(self, device: str) -> None:
        """A wrapper with buffers takes the host's offsets, page ids in place, and what it knows."""
        problem = GqaCase(seq_lens=(70, 3, 0, 33), kv="e4m3", out_dtype=E4M3, head_dim_vo=64)
        first = problem.build(device)
        buffers = graph_buffers(first)
        wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            workspace_for(first), *buffers.values()
        )
        wrapper.begin_forward(**plan_arguments(first))
        setattr(wrapper, "plan", partial(fast_decode_plan, wrapper))  # noqa: B010 - a method
        given = _fast_plan_arguments(first)
        offsets = given["indptr"].cpu()
        page_ids = wrapper._paged_kv_indices_buf
        assert page_ids is buffers["paged_kv_indices_buffer"]
        page_ids[: len(given["indices"])].copy_(given["indices"])
        given |= {"indices": page_ids, "indptr": torch.zeros_like(given["indptr"])}

        wrapper.begin_forward(**given, global_override_indptr_cpu=offsets)

        first.check(run(wrapper, first))


def test_lengths_and_offsets_stay_within_the_page_ids() -> None:
    """Whatever a device holds, a plan gives the kernels offsets and lengths that cannot fault."""
    given = Requests(
        kv_indptr=ints(-5, 2, 1, 1 << 30),
        kv_indices=torch.arange(4, dtype=torch.int32),
        kv_len_arr=ints(1 << 30, 3, 5),
    )

    offsets, lengths = within_page_ids(given, None, 16, torch.device("cpu"))

    assert offsets.tolist() == [0, 2, 1, 4]
    assert lengths.tolist() == [32, 0, 37]


@pytest.mark.parametrize("number", [int, np.int64, np.float32], ids=lambda of: of.__name__)
def test_what_asks_for_nothing_is_accepted(number: Callable[[int], Any]) -> None:
    """Keywords that ask for nothing change no bit, whether they are Python's or numpy scalars."""
    problem = SMALL.build("cpu")
    nothing: dict[str, Any] = {
        "logits_soft_cap": number(0),
        "fixed_split_size": number(-1),
        "window_right": number(0),
        "disable_split_kv": False if number is int else np.False_,
        "pos_encoding_mode": np.str_("NONE"),
        "rope_scale": 1.0,
        "rope_theta": 1e4,
        "non_blocking": False,
        "block_tables": problem.block_tables,
        "q_data_type": None,
        "data_type": "bfloat16",
        "kv_data_type": None,
        "use_token_head_sf": False,
    }
    scratch, layout = workspace_for(problem), problem.case.layout
    wrapper = BatchDecodeWithPagedKVCacheWrapper(scratch, layout, jit_args=None, jit_kwargs={})
    wrapper.plan(**plan_arguments(problem, **nothing))

    out = run(wrapper, problem)

    assert torch.equal(out, decode_planned(problem)[0])


def test_replans_of_a_graph_keep_the_memory_that_runs_read() -> None:
    """A captured run reads offsets, page ids and lengths at the same addresses."""
    problem = SMALL.build("cpu")
    second = replace(SMALL, seq_lens=(3, 0, 70, 20), seed=1).build("cpu")
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        torch.empty(0), *graph_buffers(problem).values()
    )
    addresses = []
    for given in (problem, second):
        wrapper.plan(**plan_arguments(given))
        assert wrapper._plan is not None
        addresses.append([tensor.data_ptr() for tensor in wrapper._plan.tensors])
        given.check(run(wrapper, given))

    assert addresses[0] == addresses[1]


def test_a_fast_plan_may_be_the_first() -> None:
    """The dtypes of a first fast plan are fp16, or `data_type`."""
    for dtype, given in ((torch.float16, {}), (torch.bfloat16, {"data_type": "bfloat16"})):
        problem = GqaCase(seq_lens=(70, 3), dtype=dtype).build("cpu")
        wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0))
        nothing = {"q_data_type": None, "kv_data_type": None}

        fast_decode_plan(wrapper, **_fast_plan_arguments(problem, **nothing, **given))

        problem.check(run(wrapper, problem))


def test_what_a_wrapper_says_of_itself() -> None:
    """Whether plans go to buffers of a graph, and that every kernel uses tensor cores."""
    problem = SMALL.build("cpu")
    planned = wrapper_of(problem)
    buffers = graph_buffers(problem)
    graph = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(torch.empty(0), *buffers.values())

    assert (planned.is_cuda_graph_enabled, graph.is_cuda_graph_enabled) == (False, True)
    assert planned.use_tensor_cores
