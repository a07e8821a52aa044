"""Invalid queries of MLA decode, message by message; rejected calls write nothing."""

from __future__ import annotations

import torch

from tests.families.rejections import (
    FP8_PER_TOKEN,
    RAGGED,
    SEPARATE_ROPE,
    Rejection,
    check,
    check_inputs,
    padded,
    rejections,
    strided,
)


@rejections(
    Rejection(
        "no tensor", lambda _: {"query": None}, "query: expected a torch.Tensor, got NoneType"
    ),
    Rejection(
        "three dimensions without cum_seq_lens_q",
        lambda p: {"query": p.query[:, 0]},
        "query.ndim: expected 4, got 3",
    ),
    Rejection(
        "four dimensions with cum_seq_lens_q",
        lambda p: {"query": p.query[:, None]},
        "query.ndim: expected 3, got 4",
        RAGGED,
    ),
    Rejection(
        "float32",
        lambda p: {"query": p.query.float()},
        "query.dtype: expected torch.bfloat16 or torch.float16 or torch.float8_e4m3fn, "
        "got torch.float32",
    ),
    Rejection(
        "another width",
        lambda p: {"query": p.query[..., :512]},
        "query.shape[-1]: expected 576 (kv_lora_rank + qk_rope_head_dim), got 512",
    ),
    Rejection(
        "gaps in a row",
        lambda p: {"query": strided(p.query)},
        "query.stride(-1): expected 1, got 2",
    ),
    Rejection(
        "a row stride that is no multiple of 16 bytes",
        lambda p: {"query": padded(p.query, 4)},
        "query.stride(2): expected a multiple of 8, got 580",
    ),
    Rejection(
        "no heads",
        lambda p: {"query": p.query[:, :, :0]},
        "query.shape[-2]: expected 1 to 256 heads, got 0",
    ),
    Rejection(
        "too many heads",
        lambda p: {"query": p.query.repeat(1, 1, 17, 1)},
        "query.shape[-2]: expected 1 to 256 heads, got 272",
    ),
    Rejection(
        "no query tokens",
        lambda p: {"query": p.query[:, :0]},
        "query.shape[1]: expected 1 or more, got 0",
    ),
    Rejection(
        "a gap between requests",
        lambda p: {"query": padded(p.query, 1, dim=1)},
        "query.stride(0): expected 18432 (q_len * stride of a query token), got 27648",
    ),
)
def test_query(rejection: Rejection) -> None:
    """Layout, dtype, strides and sizes of the query are checked."""
    check(rejection)


@rejections(
    Rejection(
        "max_q_len without cum_seq_lens_q",
        lambda _: {"max_q_len": 2},
        "max_q_len: expected None without cum_seq_lens_q, got 2",
    ),
    Rejection(
        "a negative max_q_len",
        lambda _: {"max_q_len": -1},
        "max_q_len: expected an int, 0 or more, got -1",
        RAGGED,
    ),
    Rejection(
        "a fraction for max_q_len",
        lambda _: {"max_q_len": 4.0},
        "max_q_len: expected an int, 0 or more, got 4.0",
        RAGGED,
    ),
    Rejection(
        "a list",
        lambda _: {"cum_seq_lens_q": [0, 1, 5]},
        "cum_seq_lens_q: expected a torch.Tensor, got list",
        RAGGED,
    ),
    Rejection(
        "another device",
        lambda _: {"cum_seq_lens_q": torch.zeros(3, dtype=torch.int32, device="meta")},
        "cum_seq_lens_q.device: expected cpu (of query), got meta",
        RAGGED,
    ),
    Rejection(
        "int64",
        lambda _: {"cum_seq_lens_q": torch.tensor([0, 1, 5])},
        "cum_seq_lens_q.dtype: expected torch.int32 or torch.uint32, got torch.int64",
        RAGGED,
    ),
    Rejection(
        "lengths instead of offsets",
        lambda _: {"cum_seq_lens_q": torch.tensor([1, 4], dtype=torch.int32)},
        "cum_seq_lens_q.shape: expected [3] (batch + 1), got [2]",
        RAGGED,
    ),
    Rejection(
        "gaps",
        lambda _: {"cum_seq_lens_q": strided(torch.tensor([0, 1, 5], dtype=torch.int32))},
        "cum_seq_lens_q must be contiguous: expected no gaps in shape [3], got strides (2,)",
        RAGGED,
    ),
    Rejection(
        "query tokens without requests",
        lambda p: {
            "cum_seq_lens_q": torch.zeros(1, dtype=torch.int32),
            "seq_lens": p.seq_lens[:0],
            "block_tables": p.block_tables[:0],
        },
        "query.shape[0]: expected 0 (no requests), got 5",
        RAGGED,
    ),
)
def test_ragged_queries(rejection: Rejection) -> None:
    """Ragged queries have cumulative lengths, and optionally the maximum length."""
    check(rejection)


@rejections(
    Rejection(
        "no tensor",
        lambda _: {"query_rope": 1.0},
        "query: expected a torch.Tensor, got float",
        SEPARATE_ROPE,
    ),
    Rejection(
        "another device",
        lambda p: {"query_rope": p.extra_args["query_rope"].to("meta")},
        "query.device: expected cpu (of query), got meta",
        SEPARATE_ROPE,
    ),
    Rejection(
        "another dtype",
        lambda p: {"query_rope": p.extra_args["query_rope"].half()},
        "query.dtype: expected torch.bfloat16 (dtype of query), got torch.float16",
        SEPARATE_ROPE,
    ),
    Rejection(
        "another width",
        lambda p: {"query_rope": p.extra_args["query_rope"][..., :32]},
        "query.shape: expected [2, 2, 16, 64], got [2, 2, 16, 32]",
        SEPARATE_ROPE,
    ),
    Rejection(
        "gaps in a row",
        lambda p: {"query_rope": strided(p.extra_args["query_rope"])},
        "query.stride(-1): expected 1, got 2",
        SEPARATE_ROPE,
    ),
    Rejection(
        "a gap between requests",
        lambda p: {"query_rope": padded(p.extra_args["query_rope"], 1, dim=1)},
        "query.stride(0): expected 2048 (q_len * stride of a query token), got 3072",
        SEPARATE_ROPE,
    ),
    Rejection(
        "a latent part as wide as the whole",
        lambda p: {"query": p.query.repeat(1, 1, 1, 2)[..., :576]},
        "query.shape[-1]: expected 512 (kv_lora_rank), got 576",
        SEPARATE_ROPE,
    ),
)
def test_a_separate_query_rope(rejection: Rejection) -> None:
    """A separate rope part has the shape and dtype of the latent part."""
    check_inputs(rejection)


@rejections(
    Rejection(
        "bf16",
        lambda p: {"query": p.query.view(torch.bfloat16)},
        "query.dtype: expected torch.float8_e4m3fn or torch.uint8 (640-byte rows), "
        "got torch.bfloat16",
        FP8_PER_TOKEN,
    ),
    Rejection(
        "another width",
        lambda p: {"query": p.query[..., :576]},
        "query.shape[-1]: expected 640 (bytes of a row of fp8_per_token), got 576",
        FP8_PER_TOKEN,
    ),
    Rejection(
        "scales of another number of tokens",
        lambda _: {"query_scales": torch.ones(3)},
        "q_scale.shape: expected [4] (query tokens), got [3]",
        FP8_PER_TOKEN,
    ),
    Rejection(
        "scales in bf16",
        lambda _: {"query_scales": torch.ones(4).bfloat16()},
        "q_scale.dtype: expected torch.float32, got torch.bfloat16",
        FP8_PER_TOKEN,
    ),
    Rejection(
        "scales with gaps",
        lambda _: {"query_scales": strided(torch.ones(4))},
        "q_scale must be contiguous: expected no gaps in shape [4], got strides (2,)",
        FP8_PER_TOKEN,
    ),
    Rejection(
        "scales on another device",
        lambda _: {"query_scales": torch.ones(4, device="meta")},
        "q_scale.device: expected cpu (of query), got meta",
        FP8_PER_TOKEN,
    ),
    Rejection(
        "scales of other rows",
        lambda _: {"query_scales": torch.ones(4)},
        "q_scale: expected None without 640-byte rows, got a tensor",
        SEPARATE_ROPE,
    ),
)
def test_an_fp8_per_token_query(rejection: Rejection) -> None:
    """An fp8_per_token query has 640-byte rows, and an optional scale for each token."""
    check_inputs(rejection)
