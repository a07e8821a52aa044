"""Invalid values for numbers, bools, strings and tensors."""

from __future__ import annotations

import math
import warnings
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch


class Unshowable:
    """An object whose special methods all raise."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> NoReturn:
        raise ValueError("no repr")

    def __bool__(self) -> NoReturn:
        raise ValueError("no truth")

    def __eq__(self, other: object) -> NoReturn:
        raise ValueError("no equality")

    def __index__(self) -> NoReturn:
        raise ValueError("no index")

    def __len__(self) -> NoReturn:
        raise ValueError("no length")


class MultilineRepr:
    """An object with a repr of many lines."""

    def __repr__(self) -> str:
        return "a\nb" * 100_000


class UnequalStr(str):
    """A str that equals no other str."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


class NamedInt(IntEnum):
    """An int enum."""

    FOUR = 4


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 10**5000),
    *(0.0, -0.0, 1.5, 1e39, math.inf, -math.inf, math.nan, 1j),
    *("", "auto", "AUTO", "3", "a\nb\u2028c", "x" * 100_000, UnequalStr("auto"), b"\n" * 1000),
    *([], [1], [[None]], (1, 2), {"a": 1}, {1}, range(10**9)),
    *(object(), type("a\nb", (), {})(), Unshowable(), MultilineRepr(), NamedInt.FOUR),
    *(Decimal(1), Fraction(1, 2), Path("a"), lambda *_: None),
    *(np.True_, np.int8(16), np.uint8(64), np.uint8(200), np.uint64(2**63), np.int64(1)),
    *(np.int64(-1), np.float16(0.5), np.float32(0.5), np.float64(2.0), np.longdouble("1e400")),
    *(np.str_("auto"), np.timedelta64(1, "s"), np.datetime64("2026-01-01")),
    *(np.array(64), np.array([64]), np.array([True, False]), np.zeros((1000, 1000))),
    *(np.array("auto"), np.array([None], dtype=object)),
    *(torch.tensor(1), torch.tensor(1.0), torch.tensor([True]), torch.zeros(2, 3)),
    *(torch.zeros(()).expand(2**20, 2**20), torch.zeros(3, dtype=torch.complex64)),
    *(torch.empty(2, device="meta"), torch.float32, torch.device("cpu"), torch.Size([1])),
)


def nested(tensor: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor, of a dtype that torch can nest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([tensor.bfloat16() if tensor.itemsize < 4 else tensor])
