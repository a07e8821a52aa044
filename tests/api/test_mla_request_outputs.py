"""Bad scales, sinks and outputs of MLA decode, message by message."""

from __future__ import annotations

import pytest
import torch

from tests.api.refusals import RAGGED, SINGLE, Refusal, check, refusals, strided


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
    """A scale is a number, or one fp32 element where the query is."""
    check(Refusal("", lambda _: {argument: scale}, f"{argument}{message}"))


@refusals(
    Refusal(
        "a number",
        lambda _: {"sinks": 1.0},
        "sinks: expected a torch.Tensor, got float",
    ),
    Refusal(
        "a list of two",
        lambda _: {"sinks": [torch.zeros(16), torch.zeros(16)]},
        "sinks: expected a list of one tensor, got 2",
    ),
    Refusal(
        "another device",
        lambda _: {"sinks": torch.zeros(16, device="meta")},
        "sinks.device: expected cpu (of query), got meta",
    ),
    Refusal(
        "bf16",
        lambda _: {"sinks": torch.zeros(16, dtype=torch.float64)},
        "sinks.dtype: expected torch.float32, got torch.float64",
    ),
    Refusal(
        "other heads",
        lambda _: {"sinks": torch.zeros(8)},
        "sinks.shape: expected [16] (heads of query), got [8]",
    ),
    Refusal(
        "gaps",
        lambda _: {"sinks": strided(torch.zeros(16))},
        "sinks must be contiguous: expected no gaps in shape [16], got strides (2,)",
    ),
)
def test_sinks(refusal: Refusal) -> None:
    """Sinks are one fp32 logit for each head."""
    check(refusal)


@refusals(
    Refusal(
        "text",
        lambda _: {"out": "out"},
        "out: expected a torch.Tensor, got str",
    ),
    Refusal(
        "another device",
        lambda _: {"out": torch.empty(2, 2, 16, 512, dtype=torch.bfloat16, device="meta")},
        "out.device: expected cpu (of query), got meta",
    ),
    Refusal(
        "another dtype",
        lambda _: {"out": torch.empty(2, 2, 16, 512)},
        "out.dtype: expected torch.bfloat16 (dtype of query), got torch.float32",
    ),
    Refusal(
        "without query tokens where there are two",
        lambda _: {"out": torch.empty(2, 16, 512, dtype=torch.bfloat16)},
        "out.shape: expected [2, 2, 16, 512], got [2, 16, 512]",
    ),
    Refusal(
        "the width of the query where there is one query token",
        lambda _: {"out": torch.empty(2, 1, 16, 576, dtype=torch.bfloat16)},
        "out.shape: expected [2, 1, 16, 512] or [2, 16, 512], got [2, 1, 16, 576]",
        SINGLE,
    ),
    Refusal(
        "gaps",
        lambda _: {"out": strided(torch.empty(2, 2, 16, 512, dtype=torch.bfloat16))},
        "out must be contiguous: expected no gaps in shape [2, 2, 16, 512], "
        "got strides (32768, 16384, 1024, 2)",
    ),
)
def test_out(refusal: Refusal) -> None:
    """A given output has the query's dtype and device, and no gaps."""
    check(refusal)


@refusals(
    Refusal(
        "a number",
        lambda _: {"lse": 0.0},
        "lse: expected a torch.Tensor, got float",
    ),
    Refusal(
        "another device",
        lambda _: {"lse": torch.empty(4, 16, device="meta")},
        "lse.device: expected cpu (of query), got meta",
    ),
    Refusal(
        "bf16",
        lambda _: {"lse": torch.empty(4, 16, dtype=torch.bfloat16)},
        "lse.dtype: expected torch.float32, got torch.bfloat16",
    ),
    Refusal(
        "one row too few",
        lambda _: {"lse": torch.empty(3, 16)},
        "lse.shape: expected [4, 16] or [2, 2, 16], got [3, 16]",
    ),
    Refusal(
        "one shape where queries are ragged",
        lambda _: {"lse": torch.empty(2, 4, 16)},
        "lse.shape: expected [5, 16], got [2, 4, 16]",
        RAGGED,
    ),
    Refusal(
        "gaps",
        lambda _: {"lse": strided(torch.empty(4, 16))},
        "lse must be contiguous: expected no gaps in shape [4, 16], got strides (32, 2)",
    ),
    Refusal(
        "another base",
        lambda _: {"return_lse_base": "base10"},
        "return_lse_base: expected one of base2, basee, got 'base10'",
    ),
)
def test_lse(refusal: Refusal) -> None:
    """A given LSE is fp32 in one of two shapes; its base is 2 or e."""
    check(refusal)


@refusals(
    Refusal(
        "none",
        lambda _: {"workspace_buffer": None},
        "workspace_buffer: expected a torch.Tensor, got NoneType",
    ),
    Refusal(
        "another device",
        lambda _: {"workspace_buffer": torch.empty(64, device="meta")},
        "workspace_buffer.device: expected cpu (of query), got meta",
    ),
    Refusal(
        "gaps",
        lambda _: {"workspace_buffer": strided(torch.empty(64))},
        "workspace_buffer must be contiguous: expected no gaps in shape [64], got strides (2,)",
    ),
)
def test_workspace(refusal: Refusal) -> None:
    """The workspace is any tensor without gaps where the query is."""
    check(refusal)
