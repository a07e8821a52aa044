"""What the planned and the planless runs of MLA, and their plans, reject."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from tests.odd_values import nested
from tests.problems.batch_mla import (
    SINGLE,
    SOME,
    graph_buffers,
    new_wrapper,
    plan_arguments,
    run,
    run_arguments,
    wrapper_of,
)
from tests.problems.mla import KINDS
from tests.problems.problem import E4M3, bf16, ints
from tests.rejected import Row, rejections_of, rejects
from tests.test_batch_mla import packed_arguments, split_plan

PROBLEM = SOME.build("cpu")
PROBLEMS = {
    "fp8 run": replace(SOME, **KINDS["bf16 over e4m3 with two scales"]).build("cpu"),
    "run without rope": replace(SOME, qk_rope_head_dim=0).build("cpu"),
    "planless": SINGLE.build("cpu"),
}
CSR, DENSE, SETTINGS = split_plan(PROBLEM)
TABLES = {"kv_len": PROBLEM.seq_lens, "page_table": torch.zeros(4, 7, dtype=torch.int32)}
E4M3_DIMS = "head_dim_ckv=512 and head_dim_kpe in (0, 64)"
DIMS = "(kv_lora_rank, qk_rope_head_dim) (128, 64)"
FP16, THRESHOLD = torch.float16, "skip_softmax_threshold_scale_factor"
FP8 = {"output_scale": "per-tensor", "output_dtype": E4M3}
FP8_OUT, E5M2_OUT = bf16(4, 6, 512).to(E4M3), bf16(6, 6, 512).to(torch.float8_e5m2)
THREE_SEQUENCES = {"kv_len_arr": ints(1, 2, 3), "qo_indptr": ints(0, 2, 3, 6)}
THREE_SEQUENCES |= {"kv_indptr": ints(0, 3, 4, 11)}
NO_TABLES = MLAPlanMetadata(*(ints(0),) * 4, max_q_len=3)
ROWS: dict[str, list[Row]] = {
    "init": [("backend", "fa4", ": expected one of auto, autotune, fa2, fa3...")],
    "plan": [
        ("", {"kv_data_type": torch.float32}, "MLA kv_data_type: expected torch.bfloat16 or ..."),
        ("", {"kv_data_type": [1]}, "MLA kv_data_type: expected torch.bfloat16 or ..., got [1]"),
        ("q_data_type", [1], ": expected torch.bfloat16 (kv_data_type), got [1]"),
        ("head_dim_kpe", -1, " must be >= 0, got -1"),
        ("", {"kv_data_type": E4M3, "q_data_type": FP16}, "...q_data_type=torch.bfloat16..."),
        ("", {"kv_data_type": E4M3, "head_dim_ckv": 256}, f"...expected {E4M3_DIMS}..."),
        ("", {"kv_data_type": E4M3, "head_dim_kpe": 32}, f"...expected {E4M3_DIMS}..."),
        ("q_data_type", torch.float16, ": expected torch.bfloat16 (kv_data_type), got ..."),
        ("", {"head_dim_ckv": 128}, f"no MLA decode kernel for query bf16, cache bf16, {DIMS}..."),
        ("use_profiler", True, ": Profiler is enabled, but not implemented, expected False, ..."),
        ("num_heads", 0, ": expected an int, 1 or more, got 0"),
        ("num_heads", 257, ": expected 256 or less, got 257"),
        ("page_size", 0, ": expected an int, 1 or more, got 0"),
        ("sm_scale", "1", ": expected a float, got '1'"),
        ("kv_indices", [1], ": expected a torch.Tensor, got list"),
        ("kv_len_arr", torch.zeros(4), ".dtype: expected torch.int32 or torch.uint32, got ..."),
        ("kv_len_arr", ints(1)[None], ".ndim: expected 1, got 2"),
        ("", {"kv_len_arr": ints(1, 2, 3, 4, 5)}, "qo_indptr.shape: expected [6] or longer (b..."),
        ("kv_indptr", ints(0, 1), ".shape: expected [5] or longer (batch of kv_len_arr + 1), ..."),
        ("qo_indptr", ints(0, 2, 1, 6, 6), "[2]: expected 2 or more (qo_indptr[1]), got 1"),
        ("qo_indptr", ints(1, 2, 3, 6, 6), "[0]: expected 0, got 1"),
        ("kv_indptr", ints(0, 3, 2, 11, 12), "[2]: expected 3 or more (kv_indptr[1]), got 2"),
        ("kv_indptr", ints(0, 3, 4, 11, 99), "[-1]: expected 20 (page ids) or less, got 99"),
        ("kv_len_arr", ints(40, -7, 100, 5), "[1]: expected 0 or more, got -7"),
        ("kv_len_arr", ints(49, 7, 100, 5), "[0]: expected 48 (capacity of its block table) ..."),
    ],
    "plan of block tables": [
        ("block_tables", ints(1), ".ndim: expected 2, got 1"),
        ("block_tables", ints(1)[None], ".shape[0]: expected 4 (batch of seq_lens), got 1"),
        ("cum_seq_lens_q", ints(0, 1), ".shape: expected [5] or longer (batch of seq_lens + ..."),
        ("cum_seq_lens_q", ints(0, 2, 1, 6, 6), "[2]: expected 2 or more (cum_seq_lens_q[1]), ..."),
        ("seq_lens", ints(40, 7, 9999, 5), "[2]: expected 144 (capacity of its block ta..."),
        ("seq_lens", None, ": expected a torch.Tensor, as cum_seq_lens_q, block_tables, ..."),
        ("seq_lens", torch.zeros(4), ".dtype: expected torch.int32 or torch.uint32, got ..."),
        ("max_q_len", 2, ": expected 3 or more (cum_seq_lens_q), got 2"),
    ],
    "plan of metadata": [
        ("metadata", (1,), ": expected an MLAPlanMetadata, got tuple"),
        ("", {"metadata": None}, "qo_indptr: expected a torch.Tensor, as qo_indptr, kv_indptr..."),
        ("", {"kv_indptr": ints(0)}, "metadata: expected None with metadata by name, got kv_in..."),
        (
            "",
            {"metadata": None, "qo_indptr": ints(0), "seq_lens": ints(0)},
            "metadata: expected...",
        ),
        ("", {"metadata": NO_TABLES}, "max_q_len: expected None without block_tables, got 3"),
        ("lse_mode", "base10", ": expected one of none, base2, basee, got 'base10'"),
        ("query_layout", "wide", ": expected one of packed, split, got 'wide'"),
        ("kv_cache_layout", "wide", ": expected one of packed, split, got 'wide'"),
        ("output_scale", "per-row", ": expected one of none, per-tensor, got 'per-row'"),
        ("scale_mode", "kv-per-tensor", ": expected another for a cache of the query's dtype, ..."),
        ("output_dtype", E4M3, ": expected torch.bfloat16 (output_scale 'none'), got ..."),
        ("", {"output_scale": "per-tensor"}, "output_dtype: expected torch.float8_e4m3fn or ..."),
        ("output_dtype", 1, ": expected a torch.dtype, got 1"),
        ("scale_mode", "bmm-tensor", ": expected another than 'bmm-tensor', which is not ..."),
    ],
    "plan of both": [("seq_lens", DENSE["seq_lens"] - 1, ": expected kv_len_arr, as both f...")],
    "plan of a graph": [
        ("kv_indices", ints(*range(30)), ".shape[0]: expected 25 (its buffer)..."),
        ("kv_len_arr", THREE_SEQUENCES, ".shape: expected [4] (its buffer..."),
    ],
    "run without a plan": [
        ("", {"kv_len": PROBLEM.seq_lens}, "...expected plan() to be called first..."),
        ("o_scale", 0.1, " is only supported with the cutlass..."),
    ],
    "run": [
        ("o_scale", 1.0, " is only supported with the cutlass backend for now, or with ..."),
        ("q_nope", torch.zeros(6, 6, 512), ".dtype: expected torch.bfloat16 (q_data_type of ..."),
        ("q_pe", torch.zeros(6, 6, 64), ".dtype: expected torch.bfloat16 (q_data_type of ..."),
        ("ckv_cache", torch.zeros(9, 16, 512), ".dtype: expected torch.bfloat16 (kv_data_type ..."),
        ("kpe_cache", torch.zeros(9, 16, 64), ".dtype: expected torch.bfloat16 (kv_data_type ..."),
        ("q_nope", bf16(6, 7, 512), ".shape[1]: expected 6 (num_heads of plan), got 7"),
        ("ckv_cache", bf16(9, 32, 512), ".shape[1]: expected 16 (page_size of plan), got 32"),
        ("q_nope", bf16(5, 6, 512), ".shape[0]: expected 6 (qo_indptr[-1]) or more, got 5"),
        *(
            ("q_pe", bf16(*shape), f".shape: expected [6, 6, 64] (tokens, ...), got {[*shape]}")
            for shape in ((6, 6, 32), (5, 6, 64), (12, 3, 64))
        ),
        ("", {"out": torch.zeros(6, 6, 256)}, "Invalid shape of out: expected [6, 6, 512], ..."),
        ("", {"out": torch.zeros(6, 6, 512)}, "Invalid dtype of out: expected torch.bfloat16..."),
        *((name, nested(torch.zeros(6, 6)), ": expected a dense...") for name in ("out", "lse")),
        ("", {"lse": torch.zeros(6, 5)}, "Invalid shape of lse: expected [6, 6], got [6, 5]"),
        ("", {"lse": torch.zeros(6, 6).half()}, "Invalid dtype of lse: expected torch.float32,..."),
        ("", {"lse": torch.zeros(6, 6, device="meta")}, "Invalid device of lse: expected cpu, ..."),
        ("ckv_scale", 1.0, ", ckv_scale_arr, kpe_scale: only valid when kv_data_type is ..."),
        ("", {"kpe_scale": 1.0}, "ckv_scale, ckv_scale_arr, kpe_scale: only valid when ..."),
        ("", {"ckv_scale_arr": torch.zeros(1)}, "...kpe_scale: only valid when..."),
        ("profiler_buffer", torch.zeros(1), ": not implemented..."),
    ],
    "run without rope": [
        ("kpe_cache", bf16(9, 16, 64), ".shape[2]: expected 0 (head_dim_kpe of plan)..."),
    ],
    "fp8 run": [
        ("", {"ckv_scale": None}, "Exactly one of ckv_scale or ckv_scale_arr: expected for an ..."),
        ("", {"ckv_scale_arr": torch.ones(1)}, "Exactly one of ckv_scale or ckv_scale_arr: ..."),
        ("kpe_scale", None, " is required: expected a float for an e4m3 cache, got None"),
        *(
            (name, value, " must be a finite positive value...")
            for name in ("ckv_scale", "kpe_scale")
            for value in (0.0, -1.0, math.inf, math.nan, True, "1", torch.ones(1))
        ),
        *(
            (name, value, f" must be ... a number that float32 can hold, got {shown}")
            for name in ("ckv_scale", "kpe_scale")
            for value, shown in ((10**400, "an int of 1329 bits"), (1e39, "1e+39"))
        ),
        *(
            ("", {"ckv_scale": None, "ckv_scale_arr": array}, message)
            for array, message in (
                (torch.ones(16, 4), "Invalid shape of ckv_scale_arr..."),
                (torch.ones(16, 16, 4).half(), "Invalid dtype of ckv_scale_arr..."),
                (torch.ones(16, 16, 8)[..., ::2], "ckv_scale_arr must be contiguous..."),
            )
        ),
    ],
    "planless": [
        ("return_lse", True, " does not support cutlass backend, expected none, got True"),
        ("lse", torch.zeros(4, 6), " does not support cutlass backend, expected none, got a ..."),
        ("profiler_buffer", torch.zeros(1), " does not support cutlass backend, expected ..."),
        ("ckv_scale", 1.0, " does not support cutlass backend, expected none, got 1.0"),
        ("ckv_scale_arr", torch.ones(1), " does not support cutlass backend, expected none, ..."),
        ("kpe_scale", 1.0, " does not support cutlass backend, expected none, got 1.0"),
        ("", {"o_scale": 1.0}, "out tensor must be provided when o_scale is given, got None"),
        ("out", {"o_scale": 1.0, "out": bf16(4, 6, 512)}, " must be an FP8 tensor when ..."),
        ("o_scale", {"o_scale": 0.0, "out": FP8_OUT}, " must be a finite positive value: ..."),
        ("", {"o_scale": 1.0, "out": torch.zeros(4, 6, 256).to(E4M3)}, "Invalid shape of out: ..."),
        ("o_scale", {"o_scale": 10**400, "out": FP8_OUT}, " must be ..., got an int of 1329 bits"),
        ("kpe_cache", None, ": expected a torch.Tensor, got NoneType"),
        ("kv_len", None, ": expected a torch.Tensor, got NoneType"),
        ("page_table", ints(0, 0, 0, 0), ".ndim: expected 2, got 1"),
        ("kv_len", torch.zeros(4), ".dtype: expected torch.int32 or torch.uint32, got ..."),
    ],
    "packed run": [
        ("query", bf16(6, 6, 512), ".shape[-1]: expected 576 (head_dim_ckv + ..."),
        ("query", bf16(6, 576), ".ndim: expected 3, got 2"),
        (
            "query",
            (torch.zeros(1),),
            ": expected a torch.Tensor, a pair of its parts, or a pair of ...",
        ),
        (
            "query",
            ((1, 2), (3, 4)),
            ": expected a torch.Tensor, a pair of its parts, or a pair of ...",
        ),
    ],
}
UNDECLARED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"return_lse": True}, "...LSE mode mismatch: expected none (of plan), got base2"),
    ({}, {"return_lse_base_on_e": True}, "...LSE mode mismatch: expected none ..., got basee"),
    ({"lse_mode": "base2"}, {}, "...LSE mode mismatch: expected base2 (of plan), got none"),
    ({"lse_mode": "basee"}, {"return_lse": True}, "...mismatch: expected basee ..., got base2"),
    ({}, {"sinks": torch.zeros(6)}, "...sinks mismatch: expected use_sinks=False..."),
    ({"use_sinks": True}, {}, "...sinks mismatch: expected use_sinks=True..."),
    ({}, {THRESHOLD: 0.5}, "...skip_softmax mismatch: expected False..."),
    ({"skip_softmax": True}, {}, "...skip_softmax mismatch: expected True (of plan), got None"),
    ({}, {"bmm1_scale": 1.0, "bmm2_scale": 1.0}, "...scale mode mismatch: expected default..."),
    ({"scale_mode": "bmm-scalar"}, {}, "...scale mode mismatch: expected bmm-scalar..."),
    ({"scale_mode": "bmm-scalar"}, {"bmm1_scale": 1.0}, "...must be provided together: expec..."),
    ({"skip_softmax": True}, {THRESHOLD: "1"}, f"{THRESHOLD}: expected..."),
    ({}, {"o_scale": 1.0}, "o_scale is only supported with the cutlass backend for ..."),
    (FP8, {}, "...o_scale mismatch: expected per-tensor (of plan), got None"),
    (FP8, {"o_scale": 1.0}, "out tensor must be provided when o_scale is given,..."),
    (FP8, {"o_scale": -1.0}, "o_scale must be a finite positive value: ..."),
    (FP8, {"o_scale": 1.0, "out": E5M2_OUT}, "out.dtype: expected torch.float8_e4m3fn, got ..."),
    ({}, {"kv_len": ints(1)}, "page_table: expected a torch.Tensor, got NoneType"),
    ({}, {"query": torch.zeros(1)}, "query: expected None with its parts, got both"),
]
MESSAGES = [message for _, _, message in UNDECLARED]


@rejections_of(ROWS)
def test_a_call_is_rejected(call: str, changes: dict[str, Any], message: str) -> None:
    """The message has argument, rule and value, nothing is written, and a plan stays valid."""
    problem = PROBLEMS.get(call, PROBLEM)
    wrapper, buffers = wrapper_of(problem), graph_buffers(PROBLEM, spare=5)
    out = problem.query.new_full((*problem.query.shape[:2], 512), 7.0)

    with rejects(message):
        match call:
            case "init":
                new_wrapper("cpu", **changes)
            case "plan":
                wrapper.plan(**plan_arguments(problem, **changes))
            case "plan of metadata":
                wrapper.plan(**{"metadata": MLAPlanMetadata.csr(**CSR)} | SETTINGS | changes)
            case "plan of block tables":
                wrapper.plan(metadata=MLAPlanMetadata(**DENSE | changes), **SETTINGS)
            case "plan of both":
                wrapper.plan(metadata=MLAPlanMetadata.dual(**CSR, **DENSE | changes), **SETTINGS)
            case "plan of a graph":
                graph = BatchMLAPagedAttentionWrapper(torch.empty(0), True, **buffers)
                graph.plan(**plan_arguments(problem, **changes))
            case "packed run":
                wrapper.run(**packed_arguments(problem) | changes)
            case "planless":
                planless = new_wrapper("cpu", "cutlass")
                planless.run(**run_arguments(problem, **TABLES | changes))
            case "run without a plan":
                run(new_wrapper("cpu"), problem, **changes)
            case _:
                run(wrapper, problem, **{"out": out} | changes)

    assert (out == 7.0).all()
    assert all((buffer == -1).all() for buffer in buffers.values())
    problem.check(run(wrapper, problem))


@pytest.mark.parametrize(("plan", "changes", "message"), UNDECLARED, ids=MESSAGES)
def test_a_run_that_its_plan_does_not_declare_is_rejected(
    plan: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    """The error names the difference from the plan, in FlashInfer's words, at every run."""
    wrapper = new_wrapper("cpu")
    wrapper.plan(metadata=MLAPlanMetadata.csr(**CSR), **SETTINGS, **plan)

    for _ in range(2):
        with rejects(message):
            run(wrapper, PROBLEM, **changes)


def test_scales_of_latents_need_a_plan_that_declares_them() -> None:
    """The error over an e4m3 cache names the mode that a plan without a contract lacks."""
    problem = replace(SOME, **KINDS["e4m3"]).build("cpu")
    wrapper = new_wrapper("cpu")
    wrapper.plan(**plan_arguments(problem))
    message = "ckv_scale, ckv_scale_arr, kpe_scale: expected None without scale_mode kv-per-tensor"
    with rejects(f"{message}..."):
        run(wrapper, problem, ckv_scale=1.0, kpe_scale=1.0)
