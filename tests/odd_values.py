"""Invalid values for numbers, bools, strings and tensors."""

from __future__ import annotations

import math
import warnings
from enum import IntEnum
from fractions import Fraction
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


# Four of each kind of parameter: numbers, flags, words and tensors; and what is none of them.
ODD: tuple[Any, ...] = (
    *(None, True, -1, 2**31, 10**400, 0.0, 1e39, math.nan, NamedInt.FOUR),
    *("", "auto", UnequalStr("auto"), "a\nb\u2028c" * 10_000, b"\n" * 1000),
    *([], [1], [[None]], {"a": 1}, range(10**9), Unshowable(), MultilineRepr(), Fraction(1, 2)),
    *(np.True_, np.uint64(2**63), np.int64(1), np.longdouble("1e400"), np.str_("auto")),
    *(np.array(64), np.array([True, False]), torch.tensor(1), torch.zeros(2, 3)),
    *(torch.zeros(()).expand(2**20, 2**20), torch.empty(2, device="meta"), torch.float32),
)


def nested(tensor: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor, of a dtype that torch can nest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([tensor.bfloat16() if tensor.itemsize < 4 else tensor])
