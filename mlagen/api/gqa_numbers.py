"""What the entry points of grouped-query decode make of pairs and numbers, at every call."""

from __future__ import annotations

import math
import operator
from typing import SupportsIndex

import torch

from mlagen.api.arguments import refuse, require_float32, require_tensor, shown


def pair_of(
    both: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor], argument: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return keys and values; the values are None where one tensor holds both.

    Raises
    ------
    ArgumentError
        If a tuple or list holds anything but two tensors.
    """
    if not isinstance(both, (tuple, list)):
        return both, None
    if len(both) != 2:
        refuse(argument, "a tensor, or two in a tuple or list", f"{len(both)} of them")
    key, value = both
    if key.__class__ is torch.Tensor and value.__class__ is torch.Tensor:
        return key, value
    return require_tensor(key, f"{argument}[0]"), require_tensor(value, f"{argument}[1]")


def whole_number(number: SupportsIndex, argument: str) -> int:
    """Return an int of any sign.

    Raises
    ------
    ArgumentError
        If it is a bool, a tensor, or no whole number.
    """
    if number.__class__ is int:
        return number
    if isinstance(number, (bool, torch.Tensor)) or not isinstance(number, SupportsIndex):
        refuse(argument, "an int", shown(number))
    return operator.index(number)


def window_of(window_left: SupportsIndex, argument: str) -> int:
    """Return how many tokens a row sees, its own included, of those before it; 0 is no limit.

    Raises
    ------
    ArgumentError
        As :func:`whole_number`.
    """
    before = whole_number(window_left, argument)
    return before + 1 if before >= 0 else 0


def positive_factor(number: float, argument: str) -> float:
    """Return a factor that float32 can hold.

    Raises
    ------
    ArgumentError
        If it is not a finite number above 0.
    """
    if number.__class__ is float and 1e-30 < number < 1e30:
        return number
    require_float32(number, argument)
    if not 0 < number < math.inf:
        refuse(argument, "a finite number above 0", number)
    return float(number)
