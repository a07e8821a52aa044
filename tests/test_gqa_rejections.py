"""What the entry points of grouped-query decode reject."""

from __future__ import annotations

import math
from typing import Any

import torch

from mlagen.decode import BatchDecodeWithPagedKVCacheWrapper
from tests.problems.batch_decode import (
    forward_arguments,
    graph_buffers,
    plan_arguments,
    run,
    wrapper_of,
)
from tests.problems.entry_points import ENTRY_POINTS
from tests.problems.gqa import GqaCase
from tests.problems.problem import ints
from tests.rejected import Row, rejections_of, rejects

SMALL = GqaCase(seq_lens=(70, 3, 0, 33), sink=3.0).build("cpu")
CACHES: Any = SMALL.store.caches("tuple", "NHD")
KEYS, VALUES = CACHES
ONES = torch.ones(KEYS.shape[0], 2, *KEYS.shape[1:3])
LENS, THREE_SEQUENCES = ints(1, 2), {"last_page_len": ints(1, 1, 1), "indptr": ints(0, 0, 0, 0)}
DRAFTS = GqaCase(seq_lens=(70, 3), q_len=2, sink=3.0).build("cpu")
MASKED = GqaCase(seq_lens=(70, 3), q_len=2, mask="random").build("cpu")
TABLES, SEPARATE = DRAFTS.block_tables, {"uses_shared_paged_kv_idx": False}
TOP_K: dict[str, Any] = {"sparse_top_k": 8, "sinks": None, "seq_lens": LENS[[0, 0, 0, 0]]}
INDICES = torch.zeros(4, 2, 8, dtype=torch.int32)
HEADS = {"enable_block_sparse_attention": True}
HEAD_TABLES: dict[str, Any] = {
    "block_tables": torch.stack([TABLES] * 2),
    "seq_lens": torch.stack([DRAFTS.seq_lens] * 2),
}
DCP = "causal_seqlens_kv_global"
RANK: dict[str, Any] = {"cp_world": 2, "cp_rank": 1, DCP: LENS, "return_lse": True}
ROWS: dict[str, list[Row]] = {
    "init": [
        ("jit_args", ["name"], ": not implemented, expected None..."),
        (
            "jit_kwargs",
            {"jit_kwargs": {"use_token_head_sf": True}},
            ": not implemented, expected...",
        ),
        ("paged_kv_indptr_buffer", None, ": expected a torch.Tensor, got NoneType"),
        ("paged_kv_indptr_buffer", ints(0), ".shape: expected [5] or longer (ba..."),
        ("paged_kv_indices_buffer", torch.zeros(9), ".dtype: expected torch.int32 or ..."),
        ("backend", "prims-ts", ": expected one of auto, fa2, fa3, trtllm-gen, cute-dsl, ..."),
        ("kv_layout", "nhd", ": expected one of NHD, HND, got 'nhd'"),
    ],
    "plan": [
        ("pos_encoding_mode", "ALIBI", ": not implemented, expected 'NONE', got 'ALIBI'"),
        ("logits_soft_cap", -1.0, ": expected None, 0, or a number from 1e-30 to 1e30, got -1.0"),
        (
            "logits_soft_cap",
            math.inf,
            ": expected None, 0, or a number from 1e-30 to 1e30, got inf",
        ),
        (
            "logits_soft_cap",
            math.nan,
            ": expected None, 0, or a number from 1e-30 to 1e30, got nan",
        ),
        ("logits_soft_cap", "30", ": expected a float, got '30'"),
        ("fixed_split_size", 0, ": expected an int, 1 or more, got 0"),
        ("fixed_split_size", 0.5, ": expected an int, 1 or more, got 0.5"),
        ("disable_split_kv", "no", ": expected a bool, got 'no'"),
        ("batch_invariant", "yes", ": expected a bool, got 'yes'"),
        ("window_right", 3, ": not implemented, expected 0, got 3"),
        ("use_token_head_sf", "yes", ": expected a bool, got 'yes'"),
        (
            "kv_data_type",
            {"use_token_head_sf": True},
            ": expected torch.float8_e4m3fn or torch.float8_e5m2 or torch.int8 with use_token_...",
        ),
        (
            "indptr",
            ints(0, 0, 0),
            ".shape: expected [5] or longer (batch of last_page_len + 1), ...",
        ),
        ("indices", torch.zeros(9), ".dtype: expected torch.int32 or torch.uint32, got ..."),
        ("last_page_len", ints(*[17] * 4), ": expected 0 to 16 (page_size), got [17, 17, 17, 17]"),
        ("indptr", ints(0, 99, 99, 99, 99), "[-1]: expected 11 (page ids) or less, got 99"),
        ("seq_lens", ints(0, 0, 0), ".shape: expected [4] (batch), got [3]"),
        ("seq_lens", ints(*[99] * 4), "[0]: expected 80 (capacity of its block table) or ..."),
        ("num_qo_heads", 7, ": expected a multiple of 2 (num_kv_heads), got 7"),
        ("page_size", 0, ": expected an int, 1 or more, got 0"),
        ("head_dim_vo", 72, ": expected a multiple of 16 up to 128 (head_dim), got 72"),
        ("head_dim_vo", 144, ": expected a multiple of 16 up to 128 (head_dim), got 144"),
        ("q_data_type", "float8", ": expected torch.bfloat16 or torch.float16 or torch.float8_..."),
        ("kv_data_type", torch.int32, ": expected torch.bfloat16 or torch.float16 or ..."),
        ("o_data_type", torch.float16, ": expected torch.bfloat16 or torch.float8_e4m3fn, got ..."),
        ("sm_scale", "small", ": expected a float, got 'small'"),
        ("rope_theta", "big", ": expected a float, got 'big'"),
        ("block_tables", 1, ": expected a torch.Tensor, got int"),
        ("is_causal", "yes", ": expected a bool, got 'yes'"),
    ],
    "graph plan": [
        ("indices", ints(*[0] * 99), ".shape[0]: expected 14 (its buffer) or less, got 99"),
        ("last_page_len", THREE_SEQUENCES, ".shape: expected [4] (its buffer of the ..."),
        ("q_len_per_req", 2, ": expected 1 (of the first plan), got 2"),
    ],
    "run": [
        ("q", SMALL.query[:, :7], ".shape: expected [4, 8, 128] (batch * q_len_per_req of 1, ..."),
        ("q", SMALL.query.half(), ".dtype: expected torch.bfloat16 (q_data_type of plan), got ..."),
        (
            "paged_kv_cache",
            (KEYS[:, :8], VALUES[:, :8]),
            "...: expected [16, 2] (of plan), got ...",
        ),
        ("paged_kv_cache", (KEYS.half(), VALUES.half()), ".dtype: expected torch.bfloat16 (kv..."),
        (
            "paged_kv_cache",
            (KEYS, VALUES[..., :64]),
            "[1].shape[-1]: expected 128 (head_dim_vo ...",
        ),
        ("out", SMALL.query.half(), ".dtype: expected torch.bfloat16 (o_data_type of plan), ..."),
        ("lse", torch.zeros(4, 7), ".shape: expected [4, 8] or [4, 1, 8], got [4, 7]"),
        ("window_left", "3", ": expected an int, got '3'"),
        ("", {"q_len_per_req": 2}, "q.shape: expected [8, 8, 128] (batch * q_len_per_req of 2,..."),
        ("q_len_per_req", 0, ": expected an int, 1 or more, got 0"),
        ("logits_soft_cap", -3.0, ": expected None, 0, or a number from 1e-30 to 1e30, got -3.0"),
        ("skip_softmax_threshold_scale_factor", "no", ": expected a float, got 'no'"),
        ("kv_cache_sf", ONES, ".dtype: expected no torch.float32 (use_token_head_sf of plan), ..."),
    ],
    "forward": [
        ("window_left", "5", ": expected an int, got '5'"),
        ("sm_scale", "small", ": expected a float, got 'small'"),
        ("q_scale", "small", ": expected a float or a torch.float32 tensor of one element, ..."),
        ("pos_encoding_mode", "ALIBI", ": not implemented, expected 'NONE', got 'ALIBI'"),
        ("logits_soft_cap", -3.0, ": expected None, 0, or a number from 1e-30 to 1e30, got -3.0"),
    ],
    "trtllm": [
        ("out_dtype", "nvfp4", ": not implemented, expected a torch.dtype, got 'nvfp4'"),
        ("o_sf_scale", 1.0, ": not implemented, expected None, got 1.0"),
        ("o_sf_vec_size", 16, ": not implemented, expected None, got 16"),
        ("request_order_plan", "a plan", ": not implemented, expected None, got 'a plan'"),
        ("", {"uses_shared_paged_kv_idx": False}, "block_tables.ndim: expected 3, got 2"),
        (
            "",
            SEPARATE | {"block_tables": TABLES[:, None]},
            "block_tables.shape[1]: expected 2 (...",
        ),
        ("uses_shared_paged_kv_idx", "no", ": expected a bool, got 'no'"),
        ("block_tables", TABLES[:, None].expand(-1, 2, -1), ".ndim: expected 2, got 3"),
        (
            "",
            HEADS | HEAD_TABLES | {"block_tables": TABLES},
            "block_tables.ndim: expected 3, got 2",
        ),
        (
            "",
            HEADS | HEAD_TABLES | {"block_tables": TABLES[None]},
            "block_tables.shape: expected [2, 2, ...] (KV heads, batch, pages), got ...",
        ),
        (
            "",
            HEADS | {"block_tables": torch.stack([TABLES] * 2)},
            "seq_lens.shape: expected [2, 2] (KV heads, batch), got [2]",
        ),
        (
            "",
            HEADS | HEAD_TABLES | {"block_tables": torch.stack([TABLES] * 2).mT.contiguous().mT},
            "block_tables must be contiguous: expected no gaps ...",
        ),
        ("", HEADS | HEAD_TABLES | {"window_left": 3}, "window_left: expected no window with ..."),
        ("", HEADS | HEAD_TABLES | RANK, "causal_seqlens_kv_global: expected None with ..."),
        ("", HEADS | SEPARATE, "uses_shared_paged_kv_idx: expected True with ..., got False"),
        (
            "",
            HEADS | {"skip_softmax_threshold_scale_factor": 1.0},
            "skip_softmax_threshold_scale_factor: expected None with ..., got 1.0",
        ),
        ("enable_block_sparse_attention", "yes", ": expected a bool, got 'yes'"),
        ("cp_world", 2, ": expected 1 without causal_seqlens_kv_global, got 2"),
        ("cp_rank", 1, ": expected 0 without causal_seqlens_kv_global, got 1"),
        ("cp_world", RANK | {"cp_world": 0}, ": expected an int, 1 or more, got 0"),
        ("cp_rank", RANK | {"cp_rank": -1}, ": expected an int, 0 or more, got -1"),
        ("cp_rank", RANK | {"cp_rank": 2}, ": expected less than 2 (cp_world), got 2"),
        ("return_lse", RANK | {"return_lse": False}, ": expected True, or an lse, with causal..."),
        (DCP, RANK | {DCP: [1, 2]}, ": expected a torch.Tensor, got list"),
        (DCP, RANK | {DCP: ints(1)}, ".shape: expected [2] (batch of query), got [1]"),
        (DCP, RANK | {DCP: LENS.long()}, ".dtype: expected torch.int32 or torch.uint32, got ..."),
        (
            DCP,
            RANK | {DCP: LENS.to("meta")},
            ".device: expected cpu (of the first tensor), got meta",
        ),
        (
            "window_left",
            RANK | {"window_left": 5},
            ": expected no window with causal_seqlens_kv...",
        ),
        ("mask", RANK | {"mask": MASKED.mask}, ": expected None with causal_seqlens_kv_global..."),
        (
            "block_tables",
            RANK | SEPARATE | {"block_tables": TABLES[:, None].expand(-1, 2, -1)},
            ": expected one table for keys and values with causal_seqlens_kv_global, got two",
        ),
        ("", TOP_K, "block_tables.ndim: expected 3, got 2"),
        (
            "",
            TOP_K | {"block_tables": INDICES[:, :1]},
            "block_tables.shape: expected [4, 2, 8] ...",
        ),
        (
            "",
            TOP_K | {"block_tables": INDICES},
            "kv_cache[0]: expected 1 KV head with sparse_top_k, got 2",
        ),
        ("", TOP_K | {"block_tables": None}, "block_tables: expected a torch.Tensor, got NoneType"),
        ("", TOP_K | {"sinks": torch.zeros(8)}, "sinks: expected None with sparse_top_k, got ..."),
        ("", TOP_K | {"window_left": 3}, "window_left: expected no window with sparse_top_k..."),
        (
            "",
            TOP_K | RANK,
            "causal_seqlens_kv_global: expected None with sparse_top_k, got a tensor",
        ),
        ("", TOP_K | HEADS, "enable_block_sparse_attention: expected False with sparse_top_k..."),
        ("sparse_top_k", 6, ": expected 0, or a multiple of 4, got 6"),
        ("sparse_top_k", "6", ": expected an int, 0 or more, got '6'"),
        ("request_order", 1, ": expected a torch.Tensor, got int"),
        ("request_order", ints(1), ".shape: expected [2] (batch), got [1]"),
        ("request_order", LENS.long(), ".dtype: expected torch.int32 or torch.uint32, got ..."),
        (
            "request_order",
            LENS.to("meta"),
            ".device: expected cpu (of the first tensor), got meta",
        ),
        ("length_aware_schedule", "no", ": expected a bool, got 'no'"),
        ("backend", "fa2", ": expected one of auto, xqa, trtllm-gen, cake, got 'fa2'"),
        ("out", "a word", ": expected a torch.Tensor, got str"),
        ("out_dtype", "bf16", ": expected a torch.dtype, got 'bf16'"),
        ("out_dtype", {"out_dtype": torch.float16, "out": None}, ": expected torch.bfloat16 ..."),
        ("bmm1_scale_log2", 1.0, ": expected a torch.Tensor, got float"),
        ("cp_world", "one", ": expected an int, 1 or more, got 'one'"),
        ("bf16q_fp8kv_transform_mode", "v", ": expected one of k_only, separate_kv, got 'v'"),
        ("skip_softmax_threshold_scale_factor", "no", ": expected a float, got 'no'"),
        ("multi_ctas_kv_counter_buffer", 1, ": expected a torch.Tensor, got int"),
        ("max_q_len", 1.5, ": expected an int, 0 or more, got 1.5"),
        ("sinks", [], ": expected a list of one tensor, got 0"),
        ("out", {"out": SMALL.query.half(), "out_dtype": torch.bfloat16}, ".dtype: expected..."),
        ("", {"cum_seq_lens_q": ints(0, 2, 4)}, "max_q_len: expected an int (required ..."),
    ],
}
TRTLLM = ENTRY_POINTS["trtllm_gqa"]


def new_wrapper(**changes: Any) -> BatchDecodeWithPagedKVCacheWrapper:
    """Return a wrapper for graphs, without a plan."""
    buffers = graph_buffers(SMALL) | changes
    return BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), use_cuda_graph=True, **buffers)


@rejections_of(ROWS)
def test_a_call_is_rejected(call: str, changes: dict[str, Any], message: str) -> None:
    """The message has argument, rule and value; nothing is written, and a plan stays valid."""
    wrapper = new_wrapper() if call == "graph plan" else wrapper_of(SMALL)
    wrapper.plan(**plan_arguments(SMALL))
    out = DRAFTS.new_out(7.0)

    with rejects(message):
        match call:
            case "init":
                new_wrapper(**changes)
            case "run":
                run(wrapper, SMALL, **changes)
            case "forward":
                wrapper.forward(**forward_arguments(SMALL, **changes))
            case "trtllm":
                TRTLLM.call(DRAFTS, **{"out": out} | changes)
            case _:
                wrapper.plan(**plan_arguments(SMALL, **changes))

    SMALL.check(run(wrapper, SMALL))
    assert (out == 7.0).all()


def test_what_runs_need() -> None:
    """A run needs a plan, a forward one with a scale, and no kernel has more arguments."""
    no_plan = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0))
    planned = wrapper_of(SMALL, sm_scale=0.0)

    with rejects("run: expected plan() to be called first..."):
        run(no_plan, SMALL)
    with rejects("run: expected plan() to be called first..."):
        no_plan.forward(**forward_arguments(SMALL))
    with rejects("sm_scale: expected 0 (of plan), got ..."):
        planned.forward(**forward_arguments(SMALL))
    with rejects("args: not implemented, expected none..."):
        planned.run(SMALL.query, CACHES, 1.0)


def test_planned_token_scales_are_required() -> None:
    """A run has scales of each token and KV head if and only if the plan says so."""
    problem = GqaCase(seq_lens=(70,), kv="int8", has_token_scales=True).build("cpu")
    wrapper = wrapper_of(problem)

    problem.check(run(wrapper, problem))

    rule = "kv_cache_sf.dtype: expected torch.float32 (use_token_head_sf of plan), got "
    with rejects(f"{rule}None"):
        run(wrapper, problem, kv_cache_sf=None)
    with rejects(f"{rule}torch.uint8"):
        run(wrapper, problem, kv_cache_sf=problem.block_tables.to(torch.uint8))


def test_a_workspace_of_another_device_is_rejected() -> None:
    """The plan's metadata lies on the device of the workspace that it was made with."""
    wrapper = wrapper_of(SMALL)

    with rejects("float_workspace_buffer.device: expected cpu..."):
        wrapper.reset_workspace_buffer(torch.empty(0, device="meta"), torch.empty(0))
    with rejects("int_workspace_buffer: expected a torch.Tensor, got NoneType"):
        wrapper.reset_workspace_buffer(torch.empty(0), None)  # type: ignore[arg-type]
