"""Invalid queries of grouped-query decode, message by message; rejected calls write nothing."""

from __future__ import annotations

import torch

from tests.families.gqa_rejections import (
    RAGGED,
    SINGLE,
    UNIFORM,
    Rejection,
    check,
    check_xqa,
    rejections,
)
from tests.families.rejections import padded, strided
from tests.problems.entry_points import run_xqa


@rejections(
    Rejection(
        "no tensor", lambda _: {"query": None}, "query: expected a torch.Tensor, got NoneType"
    ),
    Rejection(
        "four dimensions",
        lambda p: {"query": p.query[:, None]},
        "query.ndim: expected 3, got 4",
    ),
    Rejection(
        "float32",
        lambda p: {"query": p.query.float()},
        "query.dtype: expected torch.bfloat16 or torch.float16, got torch.float32",
    ),
    Rejection(
        "gaps in a row",
        lambda p: {"query": strided(p.query)},
        "query.stride(-1): expected 1, got 2",
    ),
    Rejection(
        "a row stride that is no multiple of 16 bytes",
        lambda p: {"query": padded(p.query, 4)},
        "query.stride(1): expected a multiple of 8, got 132",
    ),
    Rejection(
        "no heads",
        lambda p: {"query": p.query[:, :0]},
        "query.shape[-2]: expected 1 head or more, got 0",
    ),
    Rejection(
        "heads that kv heads do not divide",
        lambda p: {"query": p.query[:, :7]},
        "query.shape[-2]: expected a multiple of 2 (heads of kv_cache[0]), got 7",
    ),
    Rejection(
        "another width than the cache",
        lambda p: {"query": p.query[..., :64]},
        "kv_cache[0].shape[-1]: expected 64 (head_dim of query), got 128",
    ),
)
def test_layout(rejection: Rejection) -> None:
    """Layout, dtype, strides and sizes of the query are checked."""
    check(rejection)


@rejections(
    Rejection(
        "tokens that requests cannot share",
        lambda p: {"query": p.query[:3]},
        "query.shape[0]: expected a multiple of 2 (q_len_per_req), got 3",
        UNIFORM,
    ),
    Rejection(
        "no query tokens",
        lambda _: {"q_len_per_req": 0},
        "q_len_per_req: expected an int, 1 or more, got 0",
    ),
    Rejection(
        "a fraction of query tokens",
        lambda _: {"q_len_per_req": 1.5},
        "q_len_per_req: expected an int, 1 or more, got 1.5",
    ),
    Rejection(
        "lengths of another batch",
        lambda p: {"seq_lens": p.seq_lens.repeat(2)},
        "seq_lens.shape: expected [2] or [2, 1] (batch of query), got [4]",
    ),
    Rejection(
        "lengths of two columns",
        lambda p: {"seq_lens": p.seq_lens[:, None].repeat(1, 2)},
        "seq_lens.shape: expected [2] or [2, 1] (batch of query), got [2, 2]",
    ),
    Rejection(
        "lengths of int64",
        lambda p: {"seq_lens": p.seq_lens.long()},
        "seq_lens.dtype: expected torch.int32 or torch.uint32, got torch.int64",
    ),
    Rejection(
        "lengths on another device",
        lambda p: {"seq_lens": p.seq_lens.to("meta")},
        "seq_lens.device: expected cpu (of query), got meta",
    ),
    Rejection(
        "lengths with gaps",
        lambda p: {"seq_lens": strided(p.seq_lens)},
        "seq_lens must be contiguous: expected no gaps in shape [2], got strides (2,)",
    ),
    Rejection(
        "no lengths",
        lambda _: {"seq_lens": [70, 3]},
        "seq_lens: expected a torch.Tensor, got list",
    ),
)
def test_requests(rejection: Rejection) -> None:
    """Query tokens and lengths have the same batch size."""
    check(rejection)


@rejections(
    Rejection(
        "a longest query of one token",
        lambda _: {"q_len_per_req": 1},
        "q_len_per_req: expected 2 or more with q_cu_seq_lens, got 1",
        RAGGED,
    ),
    Rejection(
        "more tokens than the longest query allows",
        lambda _: {"q_len_per_req": 2},
        "query.shape[0]: expected 4 or less (batch * q_len_per_req), got 5",
        RAGGED,
    ),
    Rejection(
        "a list",
        lambda _: {"q_cu_seq_lens": [0, 1, 5]},
        "q_cu_seq_lens: expected a torch.Tensor, got list",
        RAGGED,
    ),
    Rejection(
        "offsets of int64",
        lambda p: {"q_cu_seq_lens": p.cum_seq_lens_q.long()},
        "q_cu_seq_lens.dtype: expected torch.int32 or torch.uint32, got torch.int64",
        RAGGED,
    ),
    Rejection(
        "offsets on another device",
        lambda p: {"q_cu_seq_lens": p.cum_seq_lens_q.to("meta")},
        "q_cu_seq_lens.device: expected cpu (of query), got meta",
        RAGGED,
    ),
    Rejection(
        "an end for each request only",
        lambda p: {"q_cu_seq_lens": p.cum_seq_lens_q[:2]},
        "q_cu_seq_lens.shape: expected [3] (batch + 1), got [2]",
        RAGGED,
    ),
    Rejection(
        "offsets with gaps",
        lambda p: {"q_cu_seq_lens": strided(p.cum_seq_lens_q)},
        "q_cu_seq_lens must be contiguous: expected no gaps in shape [3], got strides (2,)",
        RAGGED,
    ),
)
def test_ragged(rejection: Rejection) -> None:
    """Cumulative query lengths are 32-bit, with one more element than requests."""
    check(rejection)


@rejections(
    Rejection(
        "three dimensions",
        lambda p: {"q": p.query},
        "q.ndim: expected 4 or 5, got 3",
    ),
    Rejection(
        "four dimensions for several tokens",
        lambda p: {"q": p.query[:, None]},
        "q.ndim: expected 5, got 4",
        UNIFORM,
    ),
    Rejection(
        "two beams",
        lambda p: {"q": p.query[:, None].repeat(1, 2, 1, 1)},
        "q.shape[1]: expected 1, got 2",
    ),
    Rejection(
        "tokens other than q_seq_len",
        lambda p: {"q": p.query.view(2, 1, 2, 8, 128)[:, :, :1]},
        "q.shape[2]: expected 2 (q_seq_len), got 1",
        UNIFORM,
    ),
    Rejection(
        "a gap between requests",
        lambda p: {"q": padded(p.query.view(2, 1, 2, 8, 128), 1, dim=2)},
        "q.stride(0): expected 2048 (q_len * stride of a query token), got 3072",
        UNIFORM,
    ),
    Rejection(
        "a longest query of one token",
        lambda _: {"q_seq_len": 1},
        "q_seq_len: expected 2 or more with q_cu_seq_lens, got 1",
        RAGGED,
    ),
    Rejection(
        "four dimensions where queries are ragged",
        lambda p: {"q": p.query[:, None]},
        "q.ndim: expected 3, got 4",
        RAGGED,
    ),
)
def test_query_of_xqa(rejection: Rejection) -> None:
    """An axis of size 1 follows the batch, then the query tokens if there are several."""
    check_xqa(rejection)


def test_one_token_on_an_axis_of_its_own() -> None:
    """`[batch, 1, 1, heads, head_dim]` is one query token of each request."""
    problem = SINGLE.build("cpu")
    output = torch.empty(2, 1, 1, 8, 128, dtype=torch.bfloat16)

    run_xqa(problem, q=problem.query.view(2, 1, 1, 8, 128), output=output)

    problem.check(output)
