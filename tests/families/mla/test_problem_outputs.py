"""Invalid scales, sinks and outputs of MLA decode, message by message."""

from __future__ import annotations

import pytest
import torch

from tests.families.rejections import RAGGED, SINGLE, Rejection, check, rejections, strided


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
    ],
    ids=["ints", "float64", "two elements", "another device", "a bool", "none", "text"],
)
def test_scales(argument: str, scale: object, message: str) -> None:
    """A scale is a number, or one fp32 element on the query's device."""
    check(Rejection("", lambda _: {argument: scale}, f"{argument}{message}"))


@rejections(
    Rejection(
        "a number",
        lambda _: {"sinks": 1.0},
        "sinks: expected a torch.Tensor, got float",
    ),
    Rejection(
        "a list of two",
        lambda _: {"sinks": [torch.zeros(16), torch.zeros(16)]},
        "sinks: expected a list of one tensor, got 2",
    ),
    Rejection(
        "another device",
        lambda _: {"sinks": torch.zeros(16, device="meta")},
        "sinks.device: expected cpu (of query), got meta",
    ),
    Rejection(
        "bf16",
        lambda _: {"sinks": torch.zeros(16, dtype=torch.float64)},
        "sinks.dtype: expected torch.float32, got torch.float64",
    ),
    Rejection(
        "other heads",
        lambda _: {"sinks": torch.zeros(8)},
        "sinks.shape: expected [16] (heads of query), got [8]",
    ),
    Rejection(
        "gaps",
        lambda _: {"sinks": strided(torch.zeros(16))},
        "sinks must be contiguous: expected no gaps in shape [16], got strides (2,)",
    ),
)
def test_sinks(rejection: Rejection) -> None:
    """Sinks have one fp32 logit for each head."""
    check(rejection)


@rejections(
    Rejection(
        "text",
        lambda _: {"out": "out"},
        "out: expected a torch.Tensor, got str",
    ),
    Rejection(
        "another device",
        lambda _: {"out": torch.empty(2, 2, 16, 512, dtype=torch.bfloat16, device="meta")},
        "out.device: expected cpu (of query), got meta",
    ),
    Rejection(
        "another dtype",
        lambda _: {"out": torch.empty(2, 2, 16, 512)},
        "out.dtype: expected torch.bfloat16 (dtype of query), got torch.float32",
    ),
    Rejection(
        "without query tokens where there are two",
        lambda _: {"out": torch.empty(2, 16, 512, dtype=torch.bfloat16)},
        "out.shape: expected [2, 2, 16, 512], got [2, 16, 512]",
    ),
    Rejection(
        "the width of the query where there is one query token",
        lambda _: {"out": torch.empty(2, 1, 16, 576, dtype=torch.bfloat16)},
        "out.shape: expected [2, 1, 16, 512] or [2, 16, 512], got [2, 1, 16, 576]",
        SINGLE,
    ),
    Rejection(
        "gaps",
        lambda _: {"out": strided(torch.empty(2, 2, 16, 512, dtype=torch.bfloat16))},
        "out must be contiguous: expected no gaps in shape [2, 2, 16, 512], "
        "got strides (32768, 16384, 1024, 2)",
    ),
)
def test_out(rejection: Rejection) -> None:
    """An output is contiguous, with the query's dtype and device."""
    check(rejection)


@rejections(
    Rejection(
        "a number",
        lambda _: {"lse": 0.0},
        "lse: expected a torch.Tensor, got float",
    ),
    Rejection(
        "another device",
        lambda _: {"lse": torch.empty(4, 16, device="meta")},
        "lse.device: expected cpu (of query), got meta",
    ),
    Rejection(
        "bf16",
        lambda _: {"lse": torch.empty(4, 16, dtype=torch.bfloat16)},
        "lse.dtype: expected torch.float32, got torch.bfloat16",
    ),
    Rejection(
        "one row too few",
        lambda _: {"lse": torch.empty(3, 16)},
        "lse.shape: expected [4, 16] or [2, 2, 16], got [3, 16]",
    ),
    Rejection(
        "one shape where queries are ragged",
        lambda _: {"lse": torch.empty(2, 4, 16)},
        "lse.shape: expected [5, 16], got [2, 4, 16]",
        RAGGED,
    ),
    Rejection(
        "gaps",
        lambda _: {"lse": strided(torch.empty(4, 16))},
        "lse must be contiguous: expected no gaps in shape [4, 16], got strides (32, 2)",
    ),
    Rejection(
        "another base",
        lambda _: {"return_lse_base": "base10"},
        "return_lse_base: expected one of base2, basee, got 'base10'",
    ),
)
def test_lse(rejection: Rejection) -> None:
    """An LSE is fp32 in one of two shapes, to base 2 or e."""
    check(rejection)


@rejections(
    Rejection(
        "none",
        lambda _: {"workspace_buffer": None},
        "workspace_buffer: expected a torch.Tensor, got NoneType",
    ),
    Rejection(
        "another device",
        lambda _: {"workspace_buffer": torch.empty(64, device="meta")},
        "workspace_buffer.device: expected cpu (of query), got meta",
    ),
    Rejection(
        "gaps",
        lambda _: {"workspace_buffer": strided(torch.empty(64))},
        "workspace_buffer must be contiguous: expected no gaps in shape [64], got strides (2,)",
    ),
)
def test_workspace(rejection: Rejection) -> None:
    """The workspace is any contiguous tensor on the query's device."""
    check(rejection)
