"""Invalid tables, masks, sinks, outputs and scales of grouped-query decode, by message."""

from __future__ import annotations

import pytest
import torch

from tests.families.gqa_rejections import (
    E4M3_KV,
    RAGGED,
    SINGLE,
    UNIFORM,
    Rejection,
    check,
    check_xqa,
    rejections,
)
from tests.families.rejections import strided
from tests.problems.problem import E4M3


@rejections(
    Rejection(
        "none",
        lambda _: {"block_tables": None},
        "block_tables: expected a torch.Tensor, got NoneType",
    ),
    Rejection(
        "another device",
        lambda p: {"block_tables": p.block_tables.to("meta")},
        "block_tables.device: expected cpu (of query), got meta",
    ),
    Rejection(
        "int64",
        lambda p: {"block_tables": p.block_tables.long()},
        "block_tables.dtype: expected torch.int32 or torch.uint32, got torch.int64",
    ),
    Rejection(
        "three dimensions",
        lambda p: {"block_tables": p.block_tables[:, None]},
        "block_tables.ndim: expected 2, got 3",
    ),
    Rejection(
        "gaps",
        lambda p: {"block_tables": strided(p.block_tables)},
        "block_tables.stride(-1): expected 1, got 2",
    ),
    Rejection(
        "another batch",
        lambda p: {"block_tables": p.block_tables[:1]},
        "block_tables.shape[0]: expected 2 (batch), got 1",
    ),
)
def test_block_tables(rejection: Rejection) -> None:
    """Tables are 32-bit, of the query's batch and device, with dense rows."""
    check(rejection)


@rejections(
    Rejection(
        "a negative length",
        lambda _: {"max_seq_len": -1},
        "max_seq_len: expected an int, 0 or more, got -1",
    ),
    Rejection(
        "a fraction",
        lambda _: {"max_seq_len": 70.0},
        "max_seq_len: expected an int, 0 or more, got 70.0",
    ),
    Rejection(
        "a workspace that is none",
        lambda _: {"workspace_buffer": None},
        "workspace_buffer: expected a torch.Tensor, got NoneType",
    ),
    Rejection(
        "a workspace with gaps",
        lambda _: {"workspace_buffer": strided(torch.zeros(64))},
        "workspace_buffer must be contiguous: expected no gaps in shape [64], got strides (2,)",
    ),
    Rejection(
        "a workspace elsewhere",
        lambda _: {"workspace_buffer": torch.zeros(64, device="meta")},
        "workspace_buffer.device: expected cpu (of query), got meta",
    ),
)
def test_length_and_workspace(rejection: Rejection) -> None:
    """The maximum length is an int, and the workspace contiguous on the query's device."""
    check(rejection)


WORDS = "(a bit for each of 2 drafts, in 32-bit words)"


@rejections(
    Rejection(
        "a list",
        lambda _: {"mask": [1, 3]},
        "mask: expected a torch.Tensor, got list",
        UNIFORM,
    ),
    Rejection(
        "bools",
        lambda p: {"mask": p.mask.bool()},
        "mask.dtype: expected torch.uint16 or torch.uint32 or torch.int32, got torch.bool",
        UNIFORM,
    ),
    Rejection(
        "another device",
        lambda p: {"mask": p.mask.to("meta")},
        "mask.device: expected cpu (of query), got meta",
        UNIFORM,
    ),
    Rejection(
        "half a word",
        lambda p: {"mask": p.mask[..., :1].contiguous()},
        f"mask.shape: expected [2, 2, 2] or [4, 2] {WORDS}, got [2, 2, 1]",
        UNIFORM,
    ),
    Rejection(
        "a word too many",
        lambda p: {"mask": p.mask.view(torch.uint32).repeat(1, 1, 2)},
        f"mask.shape: expected [2, 2, 1] or [4, 1] {WORDS}, got [2, 2, 2]",
        UNIFORM,
    ),
    Rejection(
        "a row for each request",
        lambda p: {"mask": p.mask[:, :1].contiguous()},
        f"mask.shape: expected [2, 2, 2] or [4, 2] {WORDS}, got [2, 1, 2]",
        UNIFORM,
    ),
    Rejection(
        "by request where queries are ragged",
        lambda p: {"mask": p.mask[None]},
        "mask.shape: expected [5, 2] (a bit for each of 4 drafts, in 32-bit words), got [1, 5, 2]",
        RAGGED,
    ),
    Rejection(
        "gaps",
        lambda p: {"mask": strided(p.mask)},
        "mask must be contiguous: expected no gaps in shape [2, 2, 2], got strides (8, 4, 2)",
        UNIFORM,
    ),
)
def test_mask(rejection: Rejection) -> None:
    """A mask has a row of 32-bit words for each query token."""
    check(rejection)


@rejections(
    Rejection(
        "a list",
        lambda _: {"sinks": [torch.zeros(8)]},
        "sinks: expected a torch.Tensor, got list",
    ),
    Rejection(
        "another device",
        lambda _: {"sinks": torch.zeros(8, device="meta")},
        "sinks.device: expected cpu (of query), got meta",
    ),
    Rejection(
        "bf16",
        lambda _: {"sinks": torch.zeros(8, dtype=torch.float64)},
        "sinks.dtype: expected torch.float32, got torch.float64",
    ),
    Rejection(
        "other heads",
        lambda _: {"sinks": torch.zeros(4)},
        "sinks.shape: expected [8] or [2, 4] (heads of query), got [4]",
    ),
    Rejection(
        "the axes the other way round",
        lambda _: {"sinks": torch.zeros(4, 2)},
        "sinks.shape: expected [8] or [2, 4] (heads of query), got [4, 2]",
    ),
    Rejection(
        "gaps",
        lambda _: {"sinks": strided(torch.zeros(8))},
        "sinks must be contiguous: expected no gaps in shape [8], got strides (2,)",
    ),
)
def test_sinks(rejection: Rejection) -> None:
    """Sinks have one fp32 logit for each head."""
    check(rejection)


def bf16(*shape: int, device: str = "cpu") -> torch.Tensor:
    """Return zeros."""
    return torch.zeros(shape, dtype=torch.bfloat16, device=device)


@rejections(
    Rejection("text", lambda _: {"out": "out"}, "out: expected a torch.Tensor, got str"),
    Rejection(
        "another device",
        lambda _: {"out": bf16(2, 8, 128, device="meta")},
        "out.device: expected cpu (of query), got meta",
    ),
    Rejection(
        "e4m3 from a 16-bit cache",
        lambda _: {"out": bf16(2, 8, 128).to(E4M3)},
        "out.dtype: expected torch.bfloat16 (dtype of query; e4m3 only from a cache of e4m3), "
        "got torch.float8_e4m3fn",
    ),
    Rejection(
        "the other 16-bit dtype",
        lambda _: {"out": bf16(2, 8, 128).half()},
        "out.dtype: expected torch.bfloat16 or torch.float8_e4m3fn (the first is that of query), "
        "got torch.float16",
        E4M3_KV,
    ),
    Rejection(
        "another shape",
        lambda _: {"out": bf16(2, 2, 8, 64)},
        "out.shape: expected [4, 8, 128] or [2, 2, 8, 128], got [2, 2, 8, 64]",
        UNIFORM,
    ),
    Rejection(
        "by request where queries are ragged",
        lambda _: {"out": bf16(1, 5, 8, 128)},
        "out.shape: expected [5, 8, 128], got [1, 5, 8, 128]",
        RAGGED,
    ),
    Rejection(
        "gaps",
        lambda _: {"out": strided(bf16(2, 8, 128))},
        "out must be contiguous: expected no gaps in shape [2, 8, 128], got strides (2048, 256, 2)",
    ),
)
def test_out(rejection: Rejection) -> None:
    """An output is contiguous, with the query's shape and dtype, or e4m3 with an e4m3 cache."""
    check(rejection)


@rejections(
    Rejection(
        "none", lambda _: {"output": None}, "output: expected a torch.Tensor, got NoneType", SINGLE
    ),
    Rejection(
        "without the axis of beams",
        lambda _: {"output": bf16(2, 8, 128)},
        "output.shape: expected [2, 1, 8, 128], got [2, 8, 128]",
    ),
    Rejection(
        "another dtype",
        lambda _: {"output": bf16(2, 1, 8, 128).float()},
        "output.dtype: expected torch.bfloat16 (dtype of q; e4m3 only from a cache of e4m3), "
        "got torch.float32",
    ),
)
def test_output_of_xqa(rejection: Rejection) -> None:
    """``xqa`` requires an output with the query's shape."""
    problem = rejection.case.build("cpu")
    changes = rejection.change(problem)

    check_xqa(rejection._replace(change=lambda _: changes))


@pytest.mark.parametrize("argument", ["bmm1_scale", "bmm2_scale"])
@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor(1), ".dtype: expected torch.float32, got torch.int64"),
        (torch.ones(1).double(), ".dtype: expected torch.float32, got torch.float64"),
        (torch.ones(2), ".numel(): expected 1, got 2"),
        (torch.ones(1, device="meta"), ".device: expected cpu (of query), got meta"),
        (True, ": expected a float or a torch.float32 tensor of one element, got True"),
        (None, ": expected a float or a torch.float32 tensor of one element, got None"),
        ("1", ": expected a float or a torch.float32 tensor of one element, got '1'"),
        (1e300, ": expected a number that float32 can hold, got 1e+300"),
    ],
    ids=["ints", "float64", "two", "another device", "a bool", "none", "text", "too large"],
)
def test_scales(argument: str, scale: object, message: str) -> None:
    """A scale is a number, or one fp32 element on the query's device."""
    check(Rejection("", lambda _: {argument: scale}, f"{argument}{message}"))
    name = {"bmm1_scale": "q_scale", "bmm2_scale": "kv_scale"}[argument]
    check_xqa(Rejection("", lambda _: {name: scale}, f"{name}{message}"))
