"""The entry points of grouped-query decode give equal bits for one problem, from equal plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.decode import BatchDecodeWithPagedKVCacheWrapper
from tests.device_sync import no_device_sync
from tests.problems import batch_decode
from tests.problems.entry_points import ENTRY_POINTS
from tests.problems.gqa import GqaCase

SHAPES: dict[str, dict[str, Any]] = {
    "head dimension 512": {"head_dim": 512, "seq_lens": (111, 4097, 2500, 8193)},
    "drafts of 512": {"head_dim": 512, "seq_lens": (8200, 700), "q_len": 8, "group": 8},
    "one long": {"seq_lens": (32769,), "group": 5},
    "large pages": {"seq_lens": (1025, 300, 7, 900), "page_size": 1024, "window": 128},
    "e4m3 cache": {"seq_lens": (65537, 40, 9000), "kv": "e4m3"},
}


@pytest.mark.parametrize("metadata", ["cpu", None], ids=["on the host", "on the device"])
@pytest.mark.parametrize("facts", SHAPES.values(), ids=SHAPES)
def test_both_entry_points_give_equal_bits(facts: dict[str, Any], metadata: str | None) -> None:
    """A planned run and a call with the longest sequence have the same splits."""
    problem = GqaCase(**facts).build("cuda")
    wrapper = batch_decode.wrapper_of(problem, metadata=metadata)
    longest = max(problem.case.seq_lens)

    planned = batch_decode.run(wrapper, problem)

    called = ENTRY_POINTS["trtllm_gqa"].run(problem, max_seq_len=longest)
    assert torch.equal(planned.view(called.shape), called)
    problem.check(called)


@pytest.mark.parametrize("is_graph", [False, True], ids=["metadata on the host", "a graph's plan"])
def test_these_plans_do_not_wait_for_the_device(is_graph: bool) -> None:
    """Metadata on the CPU, and any metadata of a plan for CUDA graphs, is not waited for."""
    problem = GqaCase(seq_lens=(70, 3)).build("cuda")
    wrapper = batch_decode.wrapper_of(problem)
    if is_graph:
        buffers = batch_decode.graph_buffers(problem)
        scratch = batch_decode.workspace_for(problem)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(scratch, use_cuda_graph=True, **buffers)
    given = batch_decode.plan_arguments(problem, metadata=None if is_graph else "cpu")
    wrapper.plan(**given)
    batch_decode.run(wrapper, problem)  # compiles and loads

    with no_device_sync():
        wrapper.plan(**given)
        out = batch_decode.run(wrapper, problem)

    problem.check(out)
