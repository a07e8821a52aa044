"""Planned grouped-query decode: what is refused, and what is rejected."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from mlagen.decode import BatchDecodeWithPagedKVCacheWrapper
from mlagen.errors import ArgumentError, UnsupportedError
from tests.problems.batch_decode import (
    decode_planned,
    graph_buffers,
    plan_arguments,
    run,
    wrapper_of,
)
from tests.problems.gqa import GqaCase

SMALL = GqaCase(seq_lens=(70, 3, 0, 33), sink=3.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paged_kv_indptr_buffer": None}, "paged_kv_indptr_buffer: expected a torch.Tensor"),
        (
            {"paged_kv_indptr_buffer": torch.zeros(9, dtype=torch.int32)},
            "paged_kv_indptr_buffer.shape: expected [5]",
        ),
        (
            {"paged_kv_indices_buffer": torch.zeros(9)},
            "paged_kv_indices_buffer.dtype: expected torch.int32",
        ),
        ({"backend": "prims-ts"}, "backend: expected one of auto, fa2, fa3, "),
        ({"kv_layout": "nhd"}, "kv_layout: expected one of NHD, HND, got 'nhd'"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_invalid_constructions_are_rejected(changes: dict[str, Any], message: str) -> None:
    """Buffers, names and flags are checked."""
    buffers: dict[str, Any] = graph_buffers(SMALL.build("cpu"))

    with pytest.raises(ArgumentError, match=re.escape(message)):
        BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), use_cuda_graph=True, **buffers | changes)


def test_customized_kernels_are_refused() -> None:
    """`jit_args`, and arguments of such kernels at a run, have no kernel."""
    problem = SMALL.build("cpu")
    with pytest.raises(UnsupportedError, match="jit_args: not implemented, expected None"):
        BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), jit_args=["name"])

    with pytest.raises(UnsupportedError, match="args: not implemented, expected none"):
        wrapper_of(problem).run(problem.query, problem.store.key, 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode: not implemented, expected 'NONE'"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap: not implemented, expected None, got 30.0"),
        ({"fixed_split_size": 8}, "fixed_split_size: not implemented, expected None, got 8"),
        ({"disable_split_kv": True}, "disable_split_kv: not implemented, expected False, got True"),
        ({"window_right": 3}, "window_right: not implemented, expected 0, got 3"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_no_kernel_serves_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    """The error names the keyword and what asks for nothing."""
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        wrapper_of(SMALL.build("cpu"), **changes)


def test_what_asks_for_nothing_is_accepted() -> None:
    """Keywords that ask for nothing change no bit."""
    problem = SMALL.build("cpu")
    nothing: dict[str, Any] = {
        "logits_soft_cap": 0,
        "fixed_split_size": -1,
        "rope_scale": 1.0,
        "rope_theta": 1e4,
        "non_blocking": False,
        "block_tables": problem.block_tables,
        "q_data_type": None,
        "data_type": "bfloat16",
        "kv_data_type": None,
    }

    out = run(wrapper_of(problem, **nothing), problem)

    assert torch.equal(out, decode_planned(problem)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indptr": torch.zeros(3, dtype=torch.int32)}, "indptr.shape: expected [5] (batch of "),
        ({"indices": torch.zeros(9)}, "indices.dtype: expected torch.int32"),
        (
            {"last_page_len": torch.full((4,), 17, dtype=torch.int32)},
            "last_page_len: expected 0 to 16 (page_size), got [17, 17, 17, 17]",
        ),
        (
            {"indptr": torch.tensor([0, 99, 99, 99, 99], dtype=torch.int32)},
            "indptr",
        ),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, "seq_lens.shape: expected [4] (batch)"),
        ({"seq_lens": torch.full((4,), 99, dtype=torch.int32)}, "seq_lens[0]: expected 80 "),
        ({"num_qo_heads": 7}, "num_qo_heads: expected a multiple of 2 (num_kv_heads), got 7"),
        ({"page_size": 0}, "page_size: expected an int, 1 or more, got 0"),
        ({"q_data_type": "float8"}, "q_data_type: expected torch.bfloat16 or torch.float16 or "),
        ({"kv_data_type": torch.int32}, "kv_data_type: expected "),
        ({"o_data_type": torch.float16}, "o_data_type: expected torch.bfloat16 or "),
        ({"sm_scale": "small"}, "sm_scale: expected "),
        ({"rope_theta": "big"}, "rope_theta: expected a float, got 'big'"),
        ({"block_tables": 1}, "block_tables: expected a torch.Tensor, got int"),
        ({"is_causal": "yes"}, "is_causal: expected "),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_a_plan_that_breaks_a_rule_is_rejected(changes: dict[str, Any], message: str) -> None:
    """The message names the argument, and the previous plan stays valid."""
    problem = SMALL.build("cpu")
    wrapper = wrapper_of(problem)

    with pytest.raises(ArgumentError, match=re.escape(message)):
        wrapper.plan(**plan_arguments(problem, **changes))

    problem.check(run(wrapper, problem))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q": lambda p: p.query[:, :7]},
            "q.shape: expected [4, 8, 128] (batch * q_len_per_req of 1",
        ),
        ({"q": lambda p: p.query.half()}, "q.dtype: expected torch.bfloat16 (q_data_type of plan"),
        (
            {"paged_kv_cache": lambda p: tuple(c[:, :8] for c in p.store.caches("tuple", "NHD"))},
            "paged_kv_cache: page_size and num_kv_heads: expected [16, 2] (of plan), got [8, 2]",
        ),
        (
            {"paged_kv_cache": lambda p: tuple(c.half() for c in p.store.caches("tuple", "NHD"))},
            "paged_kv_cache.dtype: expected torch.bfloat16 (kv_data_type of plan), got torch.f",
        ),
        ({"out": lambda p: p.query.half()}, "out.dtype: expected torch.bfloat16 (o_data_type of"),
        ({"lse": lambda _: torch.zeros(4, 7)}, "lse.shape: expected [4, 8]"),
        ({"window_left": lambda _: "3"}, "window_left: expected an int, got '3'"),
        (
            {"q_len_per_req": lambda _: 2},
            "q.shape: expected [8, 8, 128] (batch * q_len_per_req of 2",
        ),
        ({"q_len_per_req": lambda _: 0}, "q_len_per_req: expected an int, 1 or more, got 0"),
        (
            {"skip_softmax_threshold_scale_factor": lambda _: "no"},
            "skip_softmax_threshold_scale_factor: expected a float, got 'no'",
        ),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_a_run_that_differs_from_its_plan_is_rejected(
    changes: dict[str, Any], message: str
) -> None:
    """Sizes and dtypes are those of the plan, and what a run has of its own is checked."""
    problem = SMALL.build("cpu")
    given = {name: change(problem) for name, change in changes.items()}

    with pytest.raises(ArgumentError, match=re.escape(message)):
        run(wrapper_of(problem), problem, **given)


def test_a_run_without_a_plan_is_rejected() -> None:
    """The message says what is missing."""
    problem = SMALL.build("cpu")

    with pytest.raises(ArgumentError, match=re.escape("run: expected plan() to be called first")):
        run(BatchDecodeWithPagedKVCacheWrapper(torch.empty(0)), problem)
