"""The argument checks: the values that each accepts, and the messages of rejections."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mlagen.errors import ArgumentError
from mlagen.families.common import arguments as checks
from mlagen.families.common.arguments import DTYPES, INDEX_DTYPES
from mlagen.spec.dtype import DType

CPU = torch.device("cpu")
MATRIX = torch.zeros(2, 16)

PASSING: dict[str, Callable[[], object]] = {
    "a true condition": lambda: checks.require(True, "x", 1, 1),
    "a tensor": lambda: checks.require_tensor(MATRIX, "x"),
    "the query's device": lambda: checks.require_device(MATRIX, "x", CPU),
    "one of the dtypes": lambda: checks.require_dtype(MATRIX, "x", (torch.float16, torch.float32)),
    "one of the shapes": lambda: checks.require_shape(MATRIX, "x", ((16,), (2, 16))),
    "one of the dimensions": lambda: checks.require_dims(MATRIX, "x", (1, 2)),
    "no gaps": lambda: checks.require_contiguous(MATRIX, "x"),
    "dense rows": lambda: checks.require_dense_last_dim(MATRIX[:, :3], "x"),
    "a last dimension of one, with any stride": lambda: checks.require_dense_last_dim(
        MATRIX[:, ::16], "x"
    ),
    "whole 16 bytes from row to row": lambda: checks.require_aligned(MATRIX, "x"),
    "one row, with any stride": lambda: checks.require_aligned(
        torch.zeros(1, 3).as_strided((1, 3), (3, 1)), "x"
    ),
    "int32 on the device": lambda: checks.require_index(MATRIX.int(), "x", CPU),
    "uint32 on the device": lambda: checks.require_index(MATRIX.int().view(torch.uint32), "x", CPU),
    "a float": lambda: checks.require_scale(0.5, "x", CPU),
    "an int": lambda: checks.require_scale(1, "x", CPU),
    "an infinity": lambda: checks.require_scale(math.inf, "x", CPU),
    "NaN": lambda: checks.require_scale(math.nan, "x", CPU),
    "the largest float32": lambda: checks.require_scale(3.4028234e38, "x", CPU),
    "an fp32 element": lambda: checks.require_scale(torch.ones(1, 1), "x", CPU),
}

REJECTED: dict[str, tuple[Callable[[], object], str]] = {
    "a number beyond float32": (
        lambda: checks.require_scale(-1e39, "x", CPU),
        "x: expected a number that float32 can hold, got -1e+39",
    ),
    "an int beyond float": (
        lambda: checks.require_scale(10**400, "x", CPU),
        "x: expected a number that float32 can hold, got an int of 1329 bits",
    ),
    "a float for a whole number": (
        lambda: checks.require_whole_number(512.0, "x", min_value=0),
        "x: expected an int, 0 or more, got 512.0",
    ),
    "a bool for a whole number": (
        lambda: checks.require_whole_number(True, "x", min_value=0),
        "x: expected an int, 0 or more, got True",
    ),
    "a tensor for a whole number": (
        lambda: checks.require_whole_number(torch.tensor(3), "x", min_value=0),
        "x: expected an int, 0 or more, got a tensor",
    ),
    "a whole number too small": (
        lambda: checks.require_whole_number(0, "x", min_value=1),
        "x: expected an int, 1 or more, got 0",
    ),
    "a false condition": (
        lambda: checks.require(False, "x.shape[0]", "2 (batch)", 3),
        "x.shape[0]: expected 2 (batch), got 3",
    ),
    "no tensor": (
        lambda: checks.require_tensor([1], "x"),
        "x: expected a torch.Tensor, got list",
    ),
    "another device": (
        lambda: checks.require_device(MATRIX, "x", torch.device("meta")),
        "x.device: expected meta (of query), got cpu",
    ),
    "another dtype": (
        lambda: checks.require_dtype(MATRIX, "x", (torch.float16, torch.bfloat16)),
        "x.dtype: expected torch.float16 or torch.bfloat16, got torch.float32",
    ),
    "another dtype, with the reason": (
        lambda: checks.require_dtype(MATRIX, "x", (torch.float16,), "dtype of query"),
        "x.dtype: expected torch.float16 (dtype of query), got torch.float32",
    ),
    "another shape": (
        lambda: checks.require_shape(MATRIX, "x", ((2, 8), (16,), (2, 8))),
        "x.shape: expected [2, 8] or [16], got [2, 16]",
    ),
    "other dimensions": (
        lambda: checks.require_dims(MATRIX, "x", (3, 4)),
        "x.ndim: expected 3 or 4, got 2",
    ),
    "gaps": (
        lambda: checks.require_contiguous(MATRIX.T, "x"),
        "x must be contiguous: expected no gaps in shape [16, 2], got strides (1, 16)",
    ),
    "rows with gaps": (
        lambda: checks.require_dense_last_dim(MATRIX.T, "x"),
        "x.stride(-1): expected 1, got 16",
    ),
    "fp32 rows with a stride of 12 bytes": (
        lambda: checks.require_aligned(torch.zeros(2, 3), "x"),
        "x.stride(0): expected a multiple of 4, got 3",
    ),
    "fp16 rows with a stride of 24 bytes": (
        lambda: checks.require_aligned(torch.zeros(2, 12).half(), "x"),
        "x.stride(0): expected a multiple of 8, got 12",
    ),
    "int64": (
        lambda: checks.require_index(MATRIX.long(), "x", CPU),
        "x.dtype: expected torch.int32 or torch.uint32, got torch.int64",
    ),
    "a complex scale": (
        lambda: checks.require_scale(1j, "x", CPU),
        "x: expected a float or a torch.float32 tensor of one element, got 1j",
    ),
}


@pytest.mark.parametrize("check", PASSING.values(), ids=PASSING)
def test_valid_values_pass(check: Callable[[], object]) -> None:
    """A check accepts a value that satisfies its rule."""
    returned = check()

    assert returned is None or returned is MATRIX


@pytest.mark.parametrize(("check", "message"), REJECTED.values(), ids=REJECTED)
def test_invalid_values_are_rejected(check: Callable[[], object], message: str) -> None:
    """The message is one line with argument, rule and value."""
    with pytest.raises(ArgumentError) as caught:
        check()

    assert str(caught.value) == message


def test_an_argument_error_is_a_value_error() -> None:
    """An ArgumentError is a ValueError, which callers of FlashInfer catch."""
    with pytest.raises(ValueError, match="x: expected 1, got 2"):
        checks.reject("x", 1, 2)


@pytest.mark.parametrize("number", [3, np.int32(3), np.uint64(3)], ids=["int", "int32", "uint64"])
def test_a_whole_number_becomes_an_int(number: int) -> None:
    """A whole number of any integer type is returned as an int."""
    returned = checks.require_whole_number(number, "x", min_value=3)

    assert (returned, type(returned)) == (3, int)


def test_every_16_bit_dtype_has_a_torch_dtype() -> None:
    """DTYPES has every 16-bit DType."""
    named = {dtype: str(ours) for dtype, ours in DTYPES.items()}

    assert named == {torch.bfloat16: "bf16", torch.float16: "fp16"}
    assert set(DTYPES.values()) == {dtype for dtype in DType if dtype.is_16bit}
    assert torch.int64 not in INDEX_DTYPES
