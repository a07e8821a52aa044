"""What MLA decode rejects."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.problems.entry_points import decode
from tests.problems.mla import MlaCase
from tests.problems.problem import E4M3, bf16, ints
from tests.rejected import Row, rejections_of, rejects

CASES = {
    "decode": MlaCase(seq_lens=(70, 3)),
    "decode of two tokens": MlaCase(seq_lens=(70, 3), q_len=2),
    "decode without rope": MlaCase(seq_lens=(70, 3), qk_rope_head_dim=0),
    "decode with values apart": MlaCase(seq_lens=(70, 3), values="other pages"),
    "bf16 lists": MlaCase(seq_lens=(300, 300), q_len=2, top_k=70),
    "lists": MlaCase(seq_lens=(300, 300), q_len=2, kv_format="fp8_ds_mla", top_k=70),
}
NOPE, PE = bf16(2, 1, 16, 512), bf16(2, 1, 16, 64)
SKIP, LENS = "skip_softmax_threshold_scale_factor", "causal_seqlens_kv_global"
COUNTERS = "multi_ctas_kv_counter_buffer"
GIVEN, FOUR = ints(70, 3), ints(1, 1, 1, 1)
RANK: dict[str, Any] = {"enable_dcp": True, "return_lse": True, LENS: GIVEN}
NO_OFFSETS = {"query": NOPE[0], "cum_seq_lens_q": torch.tensor(0, dtype=torch.int32)}
SPARSE = {"backend": "sparse"}
ROWS: dict[str, list[Row]] = {
    "decode": [
        (SKIP, torch.ones(2), ": expected a float, got a tensor"),
        (SKIP, {SKIP: True, "enable_pdl": True}, ": expected a float, got True"),
        ("enable_pdl", {SKIP: 1.0, "enable_pdl": "xqa"}, ": expected a bool, got 1.0"),
        *(
            ("backend", name, f": expected one of auto, xqa, trtllm-gen, ..., sparse, got {name!r}")
            for name in ("fa2", "", None)
        ),
        ("query", (NOPE,), ": expected a torch.Tensor or a pair (q_nope, q_pe), got 1 parts"),
        ("query", (NOPE, PE, PE), ": expected a torch.Tensor or a pair ..., got 3 parts"),
        ("query[1]", {"query": (NOPE, 1)}, ": expected a torch.Tensor, got int"),
        ("query[0]", {"query": (PE, PE)}, ".shape[-1]: expected 512 (kv_lora_rank), got 64"),
        ("query[1]", {"query": (NOPE, PE[:1])}, ".shape: expected [2, ...], got [1, 1, 16, 64]"),
        (
            "query[1]",
            {"query": (NOPE, PE.half())},
            ".dtype: expected torch.bfloat16 ... torch.float16",
        ),
        ("cp_world", 2, ": expected 1 without enable_dcp, got 2"),
        ("cp_rank", 1, ": expected 0 without enable_dcp, got 1"),
        (LENS, GIVEN, ": expected None without enable_dcp, got a tensor"),
        ("enable_dcp", "yes", ": expected a bool, got 'yes'"),
        ("return_lse", RANK | {"return_lse": False}, ": expected True with enable_dcp, got False"),
        ("cp_world", RANK | {"cp_world": 0}, ": expected an int, 1 or more, got 0"),
        ("cp_world", RANK | {"cp_world": True}, ": expected an int, 1 or more, got True"),
        ("cp_rank", RANK | {"cp_rank": -1}, ": expected an int, 0 or more, got -1"),
        ("cp_rank", RANK | {"cp_rank": 1}, ": expected less than 1 (cp_world), got 1"),
        ("query", RANK | {"query": torch.zeros(())}, ".ndim: expected 4, got 0"),
        ("cum_seq_lens_q", RANK | NO_OFFSETS, ".ndim: expected 1, got 0"),
        ("sparse_mla_top_k", RANK | {"sparse_mla_top_k": np.zeros(2)}, ": expected an int, ..."),
        (LENS, RANK | {LENS: None}, ": expected a torch.Tensor, got NoneType"),
        (LENS, RANK | {LENS: GIVEN[:1]}, ".shape: expected [2] (requests), got [1]"),
        (LENS, RANK | {LENS: GIVEN.long()}, ".dtype: expected torch.int32 or ..., got torch.int64"),
    ],
    "decode without rope": [
        ("query[1]", {"query": (NOPE, PE)}, ".shape: expected [...0] (no rope dims), got ... 64]"),
    ],
    "decode with values apart": [
        ("", RANK, "no MLA decode kernel for ...(paged, separate, dcp); supported there..."),
    ],
    "decode of two tokens": [
        ("seq_lens", None, ": expected a torch.Tensor (required without ...), got None"),
        (COUNTERS, 1, ": expected a torch.Tensor, got int"),
        (
            COUNTERS,
            torch.empty(1, device="meta"),
            ".device: expected cpu (of the first tensor), got meta",
        ),
        ("cute_dsl_impl", "fast", ": expected one of auto, modular, monolithic, got 'fast'"),
        ("kv_scale_format", "UE8M0-G32", ": expected one of auto, pow2_fp32, ... 'ue8m0_g32'"),
        ("", SPARSE, "sparse_mla_top_k: expected an int, 1 or more, got 0"),
        (
            "out",
            bf16(2, 2, 16, 512).to(E4M3),
            ".dtype: ... (dtype of query), got torch.float8_e4m3fn",
        ),
    ],
    "bf16 lists": [
        ("", SPARSE, "kv_cache.dtype: expected torch.uint8 (...with backend 'sparse'), ..."),
    ],
    "lists": [
        *(
            (name, SPARSE | {name: FOUR}, ": expected None with backend 'sparse', got a value")
            for name in ("sparse_mla_top_k_lens", "cum_seq_lens_q")
        ),
        (
            "seq_lens",
            SPARSE | {"seq_lens": FOUR[:3]},
            ".shape: expected [2, 2] or [4] or [2] ... [3]",
        ),
        (
            *("block_tables", {"seq_lens": None, "sparse_mla_top_k": 2**31 - 1}),
            ".shape: expected [2, 2, 2147483647] (batch, q_len, sparse_mla_top_k), got [2, 2, 70]",
        ),
    ],
}


@rejections_of(ROWS)
def test_a_decode_is_rejected(call: str, changes: dict[str, Any], message: str) -> None:
    """The message has argument, rule and value, and nothing is written."""
    problem = CASES[call].build("cpu")
    out = problem.new_out(7.0)

    with rejects(message):
        decode(problem, **{"out": out} | changes)

    assert (out == 7.0).all()
