"""Planned grouped-query decode by its other names, and as servers plan it for CUDA graphs."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

from mlagen.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from mlagen.errors import ArgumentError, UnsupportedError
from tests.problems.batch_decode import (
    graph_buffers,
    plan_arguments,
    run,
    run_arguments,
    workspace_for,
    wrapper_of,
)
from tests.problems.gqa import GqaCase, GqaProblem

SMALL = GqaCase(seq_lens=(70, 3, 0, 33))


def _forward_arguments(problem: GqaProblem, **changes: Any) -> dict[str, Any]:
    given = run_arguments(problem)
    names = ("q", "paged_kv_cache", "v_scale")
    return {name: given[name] for name in names} | {"sm_scale": problem.case.scale} | changes


def _fast_plan_arguments(problem: GqaProblem, **changes: Any) -> dict[str, Any]:
    given = plan_arguments(problem)
    del given["o_data_type"], given["is_causal"]
    return given | changes


def _forward(wrapper: BatchDecodeWithPagedKVCacheWrapper, given: dict[str, Any]) -> torch.Tensor:
    out = wrapper.forward(**given)
    assert isinstance(out, torch.Tensor)
    return out


class TestDecodeAliases:
    """Rules of the other names, on the device of the fixture."""

    def test_names_of_a_run_with_its_lse(self, device: str) -> None:
        """`run_return_lse` and `forward_return_lse` give output and LSE."""
        problem = SMALL.build(device)
        wrapper = wrapper_of(problem)
        given = run_arguments(problem)

        problem.check(*wrapper.run_return_lse(given.pop("q"), given.pop("paged_kv_cache"), **given))
        problem.check(*wrapper.forward_return_lse(**_forward_arguments(problem)))

    @pytest.mark.parametrize("planned", [1.0, 0.7])
    def test_a_forward_has_a_scale_of_its_own(self, planned: float, device: str) -> None:
        """`forward` multiplies by its `sm_scale`, and the runs after it by that of the plan."""
        problem = SMALL.build(device)
        scale, q_scale = problem.case.scale, torch.tensor(2.0, device=device)
        wrapper = wrapper_of(problem, sm_scale=scale * planned)

        problem.check(_forward(wrapper, _forward_arguments(problem)))
        halved = _forward_arguments(problem, sm_scale=scale / 2, q_scale=q_scale)
        problem.check(_forward(wrapper, halved))

        problem.check(run(wrapper, problem, q_scale=1 / planned))

    def test_the_default_scale_of_a_forward(self, device: str) -> None:
        """Without `sm_scale`, a forward has `head_dim ** -0.5`, whatever the plan has."""
        problem = GqaCase(seq_lens=(70, 3), score_scale=128**-0.5).build(device)
        wrapper = wrapper_of(problem, sm_scale=3.0)

        problem.check(_forward(wrapper, _forward_arguments(problem, sm_scale=None)))

    def test_a_forward_has_a_window_of_its_own(self, device: str) -> None:
        """A forward without a window attends to every token, whatever the plan says."""
        whole, window = (GqaCase(seq_lens=(70, 3), window=size).build(device) for size in (0, 20))
        wrapper = wrapper_of(window)

        whole.check(_forward(wrapper, _forward_arguments(whole)))
        window.check(_forward(wrapper, _forward_arguments(window, window_left=19)))

    def test_a_workspace_can_be_replaced(self, device: str) -> None:
        """A run after `reset_workspace_buffer` uses the new scratch, and the plan stays."""
        problem = GqaCase(seq_lens=(5000, 3)).build(device)
        wrapper = wrapper_of(problem)
        scratch = workspace_for(problem)

        wrapper.reset_workspace_buffer(scratch, torch.empty(0, device=device))

        problem.check(run(wrapper, problem))
        assert device == "cpu" or not bool((scratch == 0xFF).all())

    def test_plans_that_servers_make_for_graphs(self, device: str) -> None:
        """A wrapper with buffers takes the host's offsets, page ids in place, and its dtypes."""
        problem = GqaCase(seq_lens=(70, 3, 0, 33), kv="e4m3", out_dtype=torch.float8_e4m3fn)
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


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"window_left": "5"}, ArgumentError, "window_left: expected an int, got '5'"),
        ({"sm_scale": "small"}, ArgumentError, "sm_scale: expected "),
        ({"q_scale": "small"}, ArgumentError, "q_scale: expected "),
        ({"pos_encoding_mode": "ALIBI"}, UnsupportedError, "pos_encoding_mode: not implemented"),
        ({"logits_soft_cap": 3.0}, UnsupportedError, "logits_soft_cap: not implemented, expected "),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_a_forward_rejects(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """A forward rejects what breaks a rule, and what no kernel implements."""
    problem = SMALL.build("cpu")

    with pytest.raises(error, match=re.escape(message)):
        wrapper_of(problem).forward(**_forward_arguments(problem, **changes))


def test_a_forward_needs_a_plan_with_a_scale() -> None:
    """A plan of scale 0 serves no other, and no plan serves none."""
    problem = SMALL.build("cpu")
    given = _forward_arguments(problem)

    with pytest.raises(ArgumentError, match=re.escape("sm_scale: expected 0 (of plan), got ")):
        wrapper_of(problem, sm_scale=0.0).forward(**given)
    with pytest.raises(ArgumentError, match=re.escape("run: expected plan() to be called first")):
        BatchDecodeWithPagedKVCacheWrapper(torch.empty(0)).forward(**given)


def test_a_workspace_of_another_device_is_rejected() -> None:
    """The plan's metadata lies on the device of the workspace that it was made with."""
    wrapper = wrapper_of(SMALL.build("cpu"))
    elsewhere = torch.empty(0, device="meta")

    with pytest.raises(ArgumentError, match=r"float_workspace_buffer\.device: expected cpu"):
        wrapper.reset_workspace_buffer(elsewhere, torch.empty(0))
    with pytest.raises(ArgumentError, match=r"int_workspace_buffer: expected a torch\.Tensor"):
        wrapper.reset_workspace_buffer(torch.empty(0), None)  # type: ignore[arg-type]
