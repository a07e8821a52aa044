"""Converters of argument values, and how messages show invalid ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from mlagen.errors import ArgumentError
from mlagen.values import (
    as_list,
    as_str_list,
    require_choice,
    require_flag,
    require_float32,
    require_number,
    require_whole_number,
    shown,
)
from tests.odd_values import ODD, NamedInt, UnequalStr

_choice = partial(require_choice, names=("auto", "fast"))


@pytest.mark.parametrize(
    ("convert", "given", "plain"),
    [
        (require_whole_number, 5, 5),
        (require_whole_number, np.uint8(200), 200),
        (require_whole_number, NamedInt.FOUR, 4),
        (require_number, 5, 5.0),
        (require_number, np.float16(0.5), 0.5),
        (require_number, np.int8(3), 3.0),
        (require_number, 1e39, 1e39),
        (require_float32, math.inf, math.inf),
        (require_flag, True, True),
        (require_flag, 0, False),
        (require_flag, np.True_, True),
        (require_flag, np.int64(1), True),
        (_choice, "auto", "auto"),
        (_choice, np.str_("fast"), "fast"),
        (_choice, UnequalStr("auto"), "auto"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_converters_return_plain_values(
    convert: Callable[[object, str], object], given: object, plain: object
) -> None:
    """A converter returns a plain Python value for any subclass."""
    result = convert(given, "x")
    assert result == plain
    assert type(result) is type(plain)


WHOLE, FLOAT32 = "an int, 0 or more", "a number that float32 can hold"


@pytest.mark.parametrize(
    ("convert", "given", "message"),
    [
        (require_whole_number, -1, f"{WHOLE}, got -1"),
        (require_whole_number, True, f"{WHOLE}, got True"),
        (require_whole_number, 2**31, "2147483647 or less, got 2147483648"),
        (require_whole_number, 10**5000, "2147483647 or less, got an int of 16610 bits"),
        (require_whole_number, np.array(64), f"{WHOLE}, got ndarray"),
        (require_whole_number, torch.tensor(1), f"{WHOLE}, got a tensor"),
        (require_number, True, "a float, got True"),
        (require_number, "1", "a float, got '1'"),
        (require_number, 10**400, f"{FLOAT32}, got an int of 1329 bits"),
        (require_float32, 1e39, f"{FLOAT32}, got 1e+39"),
        (require_flag, 2, "a bool, got 2"),
        (require_flag, [1], "a bool, got [1]"),
        (require_flag, torch.tensor(True), "a bool, got a tensor"),
        (_choice, "AUTO", "one of auto, fast, got 'AUTO'"),
        (_choice, [torch.ones(3)], "one of auto, fast, got [a tensor]"),
        (as_str_list, [1], "a str, got 1"),
        (as_list, count(), "4096 values or fewer, got more"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_values_are_rejected(
    convert: Callable[[Any, str], object], given: object, message: str
) -> None:
    """The message has argument, rule and value."""
    with pytest.raises(ArgumentError) as caught:
        convert(given, "x")
    assert str(caught.value) == f"x: expected {message}"


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_a_value_is_shown_on_one_short_line(value: object) -> None:
    """Any value has a short one-line text, alone and in a list, whatever its repr."""
    for line in (shown(value), shown([value, (value,)])):
        assert line.isprintable()
        assert len(line) < 130
