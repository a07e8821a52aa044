"""Invalid numbers and tensor pairs of grouped-query decode."""

from __future__ import annotations

import math

import pytest
import torch

from mlagen.errors import ArgumentError
from mlagen.families.gqa.args import pair_of, positive_factor, window_of
from tests.families.gqa_rejections import Rejection, check, check_xqa, rejections


@rejections(
    Rejection("text", lambda _: {"window_left": "1"}, "window_left: expected an int, got '1'"),
    Rejection(
        "a fraction", lambda _: {"window_left": 0.5}, "window_left: expected an int, got 0.5"
    ),
    Rejection("a bool", lambda _: {"window_left": True}, "window_left: expected an int, got True"),
    Rejection(
        "a tensor",
        lambda _: {"window_left": torch.tensor(1)},
        "window_left: expected an int, got a tensor",
    ),
    Rejection(
        "nothing", lambda _: {"o_scale": 0.0}, "o_scale: expected a finite number above 0, got 0.0"
    ),
    Rejection(
        "a negative scale",
        lambda _: {"o_scale": -1},
        "o_scale: expected a finite number above 0, got -1.0",
    ),
    Rejection(
        "a NaN",
        lambda _: {"o_scale": math.nan},
        "o_scale: expected a finite number above 0, got nan",
    ),
    Rejection(
        "an infinity",
        lambda _: {"o_scale": math.inf},
        "o_scale: expected a finite number above 0, got inf",
    ),
    Rejection(
        "too large for float32",
        lambda _: {"o_scale": 1e39},
        "o_scale: expected a number that float32 can hold, got 1e+39",
    ),
    Rejection(
        "a scale in a tensor",
        lambda _: {"o_scale": torch.tensor(1.0)},
        "o_scale: expected a float, got a tensor",
    ),
)
def test_of_the_batch_decode(rejection: Rejection) -> None:
    """The window is an int of any sign, ``o_scale`` a positive number."""
    check(rejection)


@rejections(
    Rejection(
        "a fraction",
        lambda _: {"sliding_win_size": 0.5},
        "sliding_win_size: expected an int, got 0.5",
    ),
    Rejection(
        "nothing",
        lambda _: {"rcp_out_scale": 0.0},
        "rcp_out_scale: expected a finite number above 0, got 0.0",
    ),
)
def test_of_xqa(rejection: Rejection) -> None:
    """``xqa`` has the same rules with its own names."""
    check_xqa(rejection)


@pytest.mark.parametrize(("before", "window"), [(-(2**40), 0), (-1, 0), (0, 1), (2**40, 2**40 + 1)])
def test_windows_of_any_size(before: int, window: int) -> None:
    """A window includes the row's own token, and a negative one is no limit."""
    assert window_of(before, "window_left") == window


@pytest.mark.parametrize(("number", "factor"), [(1, 1.0), (2.5, 2.5), (1e-35, 1e-35), (3e38, 3e38)])
def test_positive_factors(number: float, factor: float) -> None:
    """A factor may be an int."""
    result = positive_factor(number, "o_scale")

    assert result == factor
    assert isinstance(result, float)


def test_one_tensor_is_a_pair_without_a_second() -> None:
    """One tensor has no second, and a tuple or list has both."""
    both = torch.zeros(3)

    assert pair_of(both, "kv_cache") == (both, None)
    assert pair_of((both, both), "kv_cache") == pair_of([both, both], "kv_cache") == (both, both)


def test_a_pair_is_of_tensors() -> None:
    """The message names the element that is no tensor."""
    with pytest.raises(ArgumentError) as caught:
        pair_of([None, torch.zeros(3)], "kv_cache")  # type: ignore[list-item]

    assert str(caught.value) == "kv_cache[0]: expected a torch.Tensor, got NoneType"
