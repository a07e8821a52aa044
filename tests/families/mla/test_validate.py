"""Invalid arguments of MLA decode beyond the rules of every tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.mla.flare import run_mla
from tests.families.rejections import MLA, Row, Rows, broken, check, displaced, padded
from tests.problems.entry_points import decode
from tests.problems.mla import MlaCase
from tests.problems.problem import E4M3, bf16, ints

PACKED = torch.zeros(7, 64, 656, dtype=torch.uint8)
TOP_K = "sparse_mla_top_k"
TABLE_AXES = f"(batch, q_len, {TOP_K})"
WHOLE = ": expected an int, 0 or more, got "


ROWS: Rows = {
    "trtllm": [
        ("query", lambda q: q[:, 0], ".ndim: expected 4, got 3"),
        ("query", lambda q: q[..., :512], ".shape[-1]: expected 576 (kv_lora_rank + qk_rope_head_"),
        ("query", lambda q: q[:, :, :0], ".shape[-2]: expected 1 to 256 heads, got 0"),
        ("query", lambda q: q.repeat(1, 1, 17, 1), ".shape[-2]: expected 1 to 256 heads, got 272"),
        ("query", lambda q: q[:, :0], ".shape[1]: expected 1 or more, got 0"),
        ("query", lambda q: padded(q, dim=1), ".stride(0): expected 18432 (q_len * stride of a q"),
        ("max_q_len", 2, ": expected None without cum_seq_lens_q, got 2"),
        ("kv_cache", lambda kv: (kv, kv), ": expected a torch.Tensor, got tuple"),
        ("kv_cache", lambda kv: kv[0], ".ndim: expected 3 or 4, got 2"),
        (
            "kv_cache",
            lambda kv: kv[:, None].expand(-1, 2, -1, -1),
            ".shape: expected [pages, 1, page_size, head_dim] or [pages, page_size, 1, head_dim]",
        ),
        ("kv_cache", lambda kv: kv.half(), ".dtype: expected torch.bfloat16 or torch.float8_e4m3"),
        ("kv_cache", lambda kv: kv[..., :320], ".shape[-1]: expected 576 (kv_lora_rank + qk_rope"),
        ("kv_cache", lambda kv: kv[:, :0], ".shape: expected pages of 1 token or more, got 0"),
        ("seq_lens", lambda lens: lens[:, None], ".ndim: expected 1, got 2"),
        ("seq_lens", lambda lens: lens.repeat(2), ".shape: expected [2] (batch of query), got [4]"),
        ("block_tables", lambda ids: ids[:, None], ".ndim: expected 2, got 3"),
        ("block_tables", lambda ids: ids[:1], ".shape[0]: expected 2 (batch), got 1"),
        ("sparse_mla_top_k_lens", ints(1), f": expected None without {TOP_K}, got a tensor"),
        ("max_seq_len", -1, WHOLE + "-1"),
        ("max_seq_len", torch.tensor(70), WHOLE + "a tensor"),  # which would be waited for
        ("kv_lora_rank", 512.0, WHOLE + "512.0"),
        ("qk_rope_head_dim", -64, WHOLE + "-64"),
        ("sinks", [torch.zeros(16)] * 2, ": expected a list of one tensor, got 2"),
        ("sinks", torch.zeros(8), ".shape: expected [16] (heads of query), got [8]"),
        ("sinks", bf16(1).expand(1 << 30), ".shape: expected one for each head, got [1073741824]"),
        ("out", bf16(2, 16, 512), ".shape: expected [2, 2, 16, 512], got [2, 16, 512]"),
        ("lse", torch.zeros(3, 16), ".shape: expected [4, 16] or [2, 2, 16], got [3, 16]"),
        ("lse", {"return_lse": False, "lse": "x"}, ": expected a torch.Tensor, got str"),
        ("return_lse_base", "base10", ": expected one of base2, basee, got 'base10'"),
    ],
    "trtllm ragged": [
        ("query", lambda q: q[:, None], ".ndim: expected 3, got 4"),
        ("max_q_len", -1, WHOLE + "-1"),
        ("cum_seq_lens_q", ints(1, 4), ".shape: expected [3] (batch + 1), got [2]"),
        (
            "query",
            {"cum_seq_lens_q": ints(0), "seq_lens": ints(), "block_tables": lambda ids: ids[:0]},
            ".shape[0]: expected 0 (no requests), got 5",
        ),
        ("lse", torch.zeros(2, 4, 16), ".shape: expected [5, 16], got [2, 4, 16]"),
    ],
    "run_mla rope": [
        ("query_rope", lambda q: q[..., :32], ".shape: expected [2, 2, 16, 64], got [2, 2, 16, 3"),
        ("query_rope", lambda q: padded(q, dim=1), ".stride(0): expected 2048 (q_len * stride of"),
        ("query", lambda q: q.repeat(1, 1, 1, 2)[..., :576], ".shape[-1]: expected 512 (kv_lora_"),
        ("query_scales", torch.ones(4), ": expected None without 640-byte rows, got a tensor"),
        ("rope_cache", lambda kv: kv.half(), ".dtype: expected torch.bfloat16 (dtype of kv_cache"),
        ("rope_cache", lambda kv: kv[:3], ".shape: expected [7, 64, 64] (pages, page_size, qk_ro"),
        ("kv_cache", lambda kv: kv.repeat(1, 1, 2)[..., :576], ".shape[-1]: expected 512 (kv_lor"),
    ],
    "run_mla per token": [
        ("query", lambda q: q.view(torch.bfloat16), ".dtype: expected torch.float8_e4m3fn or tor"),
        ("query", lambda q: q[..., :576], ".shape[-1]: expected 640 (bytes of a row of fp8_per_t"),
        ("query_scales", torch.ones(3), ".shape: expected [4] (query tokens), got [3]"),
        ("kv_scales", torch.ones(7, 64, 4), ".shape: expected [7, 64] (pages, page_size), got [7"),
    ],
    "xqa_mla": [
        ("q", lambda q: q.repeat(1, 2, 1, 1), ".shape[1]: expected 1, got 2"),
        ("q", lambda q: q[:, 0], ".ndim: expected 4, got 3"),
        ("q", lambda q: q[..., :512], ".shape[-1]: expected 576 (kv_lora_rank + qk_rope_head_dim"),
        ("q", lambda q: q[:, :, :0], ".shape[-2]: expected 1 to 256 heads, got 0"),
        ("k_cache", lambda kv: kv.bfloat16(), ".dtype: expected torch.float8_e4m3fn (that of q,"),
        ("k_cache", PACKED, ".dtype: expected torch.float8_e4m3fn (that of q,"),
        ("k_cache", lambda kv: kv.flatten(0, 2), ".ndim: expected 3 or 4, got 2"),
        ("v_cache", lambda kv: kv.view(torch.uint8), ".dtype: expected torch.float8_e4m3fn (dty"),
        ("v_cache", lambda kv: kv[:2], ".shape[:-1]: expected [7, 64, 1], got [2, 64, 1]"),
        (
            "v_cache",
            lambda kv: kv.as_strided(kv.shape, (64, 576, 576, 1)),
            ".stride(): expected (36864, 576, 576, 1) (of k_cache), got (64, 576, 576, 1)",
        ),
        ("v_cache", lambda kv: kv[..., :511], ".shape[-1]: expected 512 to 576 (width of k_cache)"),
        ("k_cache", lambda kv: kv[..., :320], ".shape[-1]: expected 576, got 320"),
        ("page_size", 32, ": expected 64 (of k_cache), got 32"),
        ("page_table", lambda ids: ids[:1], ".shape[0]: expected 2 (batch), got 1"),
        ("seq_lens", lambda lens: lens.repeat(1, 2), ".ndim: expected 1, got 2"),
        ("output", bf16(2, 1, 16, 576), ".shape: expected [2, 1, 16, 512] or [2, 16, 512], got"),
        ("output", bf16(2, 1, 16, 512).to(E4M3), ".dtype: expected torch.bfloat16"),
        ("k_cache", lambda kv: displaced(kv.view(torch.uint8)).view(E4M3), ".data_ptr(): expected"),
    ],
    "trtllm e4m3": [
        ("kv_cache", lambda kv: kv.bfloat16(), ".dtype: expected torch.float8_e4m3fn or torch.ui"),
        ("kv_cache", PACKED[..., :640], ".shape[-1]: expected 656 (bytes of a row of fp8_ds_mla)"),
    ],
    "trtllm packed": [
        ("kv_cache", lambda kv: kv[..., :640], ".shape[-1]: expected 656 (bytes of a row of fp8_"),
        ("kv_cache", lambda kv: padded(kv, 4), ".stride(1): expected a multiple of 16, got 660"),
    ],
    "trtllm packed no rope": [
        ("kv_cache", lambda kv: kv[..., :512], ".shape[-1]: expected 528 or more (bytes of a row"),
        ("kv_cache", lambda kv: padded(kv, 4), ".stride(1): expected a multiple of 16, got 532"),
    ],
    "run_mla packed": [
        ("rope_cache", torch.zeros(7, 64, 64), ": expected None for fp8_ds_mla, got a tensor")
    ],
    "run_mla other cache": [
        ("value_cache", lambda kv: kv.half(), ".dtype: expected torch.bfloat16 (dtype of kv_cache"),
        ("value_cache", lambda kv: kv[1:], ".shape: expected [7, 64, 576] (shape of kv_cache), g"),
        ("value_cache", lambda kv: padded(kv, 8), ".stride(): expected (36864, 576, 1) (of kv_ca"),
    ],
    "run_mla scaled": [
        ("kv_scales", lambda kv: kv[..., 0], ".shape: expected [7, 64, 4] (pages, page_size, sc"),
        ("rope_scale", "1", ": expected a float, got '1'"),
        ("rope_scale", 1e39, ": expected a number that float32 can hold, got 1e+39"),
    ],
    "run_mla": [
        ("kv_scales", torch.ones(7, 64, 4), ": expected None for query bf16, cache bf16, got a te"),
        ("latent_scale", 2.0, ": expected 1.0 unless the cache is e4m3 and the query is not, got"),
        ("rope_scale", math.nan, ": expected 1.0 unless the cache is e4m3 and the query is not"),
        ("bias", torch.zeros(4, 70), ".ndim: expected 3, got 2"),
        ("bias", torch.zeros(4, 8, 70), ".shape: expected [4, 16, 70] or [4, 1, 70] (query token"),
        ("bias", torch.zeros(4, 16, 69), ".shape[2]: expected 70 or more (max_seq_len), got 69"),
    ],
    "xqa_mla separate": [
        ("v_cache", lambda kv: kv.bfloat16(), ".dtype: expected torch.float8_e4m3fn (dtype of k_"),
        ("v_cache", lambda kv: kv[1:], ".shape: expected [7, 64, 576] (shape of k_cache), got [6"),
        (
            "v_cache",
            lambda kv: kv.repeat(1, 2, 1, 1)[:, :64],
            ".stride(): expected (36864, 576, 1) (of k_cache), got (73728, 576, 1)",
        ),
    ],
    "trtllm other pages": [
        ("block_tables", lambda ids: ids[:, 0], ".ndim: expected 3, got 2"),
        ("block_tables", lambda ids: ids[:, :1].expand(-1, 3, -1), ".shape[1]: expected 2 (keys, "),
    ],
    "trtllm sparse": [
        ("block_tables", {TOP_K: 64}, f".shape: expected [2, 2, 64] {TABLE_AXES}, got [2, 2, 70]"),
        ("block_tables", lambda ids: ids[:, 0], ".shape: expected [2, 2, 70] (batch, q_len, spar"),
        ("block_tables", lambda ids: padded(ids, dim=1), ".stride(0): expected 140 (q_len * stri"),
        ("sparse_mla_top_k", -1, WHOLE + "-1"),
        ("sparse_mla_top_k_lens", ints(1, 1), ".shape: expected [4] (query tokens), got [2]"),
    ],
    "trtllm sparse ragged": [
        ("block_tables", lambda ids: ids[None], ".shape: expected [5, 70] (query tokens, sparse_")
    ],
    "run_mla flat": [
        ("kv_indptr", lambda ptr: ptr[1:], ".shape: expected [3] (batch + 1), got [2]"),
        ("block_tables", lambda ids: ids[None], ".ndim: expected 1, got 2"),
    ],
    "trtllm single": [
        ("out", bf16(2, 1, 16, 576), ".shape: expected [2, 1, 16, 512] or [2, 16, 512], got [2, 1")
    ],
}


@broken(ROWS)
def test_a_broken_rule_is_rejected(row: Row) -> None:
    """The message has argument, rule and value, and nothing is written."""
    check(row)


DIMS = "(kv_lora_rank, qk_rope_head_dim)"
PER_TOKEN: dict[str, Any] = {"dtype": E4M3, "kv_format": "fp8_per_token", "top_k": 70}
UNSUPPORTED: dict[str, dict[str, Any]] = {
    f"query fp16, cache fp16, {DIMS} (384, 64), ": {"kv_lora_rank": 384, "dtype": torch.float16},
    f"query e4m3, cache e4m3, {DIMS} (256, 0), ": {
        "dtype": E4M3,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 0,
    },
    f"query fp8_per_token, cache fp8_per_token, {DIMS} (512, 64), "
    "(lookup, values, mask) (sparse, shared, causal); ": PER_TOKEN,
}


@pytest.mark.parametrize(("message", "changes"), UNSUPPORTED.items())
def test_unsupported_calls_are_rejected_on_the_cpu_too(
    message: str, changes: dict[str, Any]
) -> None:
    """The CPU backend rejects what no kernel supports; the message lists supported values."""
    problem = MlaCase(seq_lens=(70, 3), **changes).build("cpu")

    with pytest.raises(UnsupportedError) as caught:
        run_mla(*problem.inputs())

    assert str(caught.value).startswith("no MLA decode kernel for " + message)
    assert "supported there: (512, 64)" in str(caught.value)


def test_separate_value_pages_are_rejected_in_sparse_calls() -> None:
    """No kernel supports separate value pages with top-k indices of any shape."""
    problem = MlaCase(seq_lens=(70, 3), q_len=2, top_k=70).build("cpu")

    with pytest.raises(UnsupportedError, match=r"^uses_shared_paged_kv_idx: not implemented with"):
        decode(problem, uses_shared_paged_kv_idx=False)


def test_messages_have_the_names_of_the_entry_point() -> None:
    """A message names an argument by the entry point's parameter."""
    inputs = MLA.build("cpu").inputs(seq_lens=None)

    names = inputs.names._replace(seq_lens="kv_len_arr")
    with pytest.raises(ArgumentError, match=r"^kv_len_arr: expected a torch\.Tensor, got NoneType"):
        run_mla(*inputs._replace(names=names))
