"""Tensor guards: one call into torch checks the metadata of all tensors.

A check costs much less than reading shape, strides, dtype and device of each from Python; making a
guard costs more. The guards are Dynamo's, a private API: where they are missing or behave
differently, there are no guards, and every call is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any

import torch

Guard = Callable[..., bool]

is_nested = attrgetter("is_nested")

# Types whose shape and strides are those of the TensorImpl; a subclass may override them.
_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)


def make_guard(tensors: Sequence[torch.Tensor]) -> Guard | None:
    """Return a guard that accepts tensors with the same metadata as ``tensors``, by position.

    It rejects tensors that differ in type, shape, strides, dtype or device, and tensors that
    require grad while grad mode is enabled. It may reject tensors with equal metadata, such as an
    inference tensor in place of a normal one. A repeated tensor matches only a tensor repeated at
    the same positions. None if the guard would reject ``tensors`` themselves, or torch has no
    guards. Callers must not pass nested tensors (:data:`is_nested`), which abort the process.
    """
    if any(tensor.__class__ not in _PLAIN_CLASSES for tensor in tensors):
        return None
    guards = _valid_guards()
    guard = _build_with_repeats(guards, tensors) if guards is not None else None
    if guard is not None and any(tensor.requires_grad for tensor in tensors):
        guard = _without_grad(guard)
    return guard if guard is not None and guard(*tensors) is True else None


def _without_grad(guard: Guard) -> Guard:
    """Return a guard that rejects all tensors in grad mode, which torch's guards do not check."""
    is_grad_enabled = torch.is_grad_enabled
    return lambda *tensors: not is_grad_enabled() and guard(*tensors)


def _build_with_repeats(guards: Any, tensors: Sequence[torch.Tensor]) -> Guard | None:
    """Return a guard of tensors with repeats, which torch's guards reject."""
    positions = {id(tensor): position for position, tensor in enumerate(tensors)}
    distinct = sorted(positions.values())
    guard = _build(guards, [tensors[position] for position in distinct])
    if guard is None or len(distinct) == len(tensors):
        return guard
    # A slice of one tensor is a tuple, as several items are.
    distinct_of = itemgetter(*distinct) if len(distinct) > 1 else itemgetter(slice(1))
    firsts = [positions[id(tensor)] for tensor in tensors]
    repeats = [(position, first) for position, first in enumerate(firsts) if position != first]

    def guard_with_repeats(*given: torch.Tensor) -> bool:
        for position, first in repeats:
            if given[position] is not given[first]:
                return False
        return guard(*distinct_of(given))

    return guard_with_repeats


def _build(guards: Any, tensors: Sequence[torch.Tensor]) -> Guard | None:
    try:
        guard: Guard = guards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        ).check
    except (AttributeError, RuntimeError, TypeError, ValueError):  # the API of another torch
        return None
    return guard


@cache
def _valid_guards() -> Any | None:
    """Return torch's guard class, if it distinguishes tensors as required."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    first, second = (torch.zeros((2, 3), dtype=torch.uint8, device="cpu") for _ in range(2))
    guard = _build(TensorGuards, (first, second))
    if guard is None:
        return None
    different = (
        None,
        torch.zeros((2, 4), dtype=torch.uint8, device="cpu"),
        torch.zeros((2, 3, 1), dtype=torch.uint8, device="cpu"),
        torch.zeros((3, 2), dtype=torch.uint8, device="cpu").t(),
        torch.zeros((2, 3), dtype=torch.int32, device="cpu"),
        torch.zeros((2, 3), dtype=torch.uint8, device="meta"),
    )
    try:
        accepts_equal = guard(first, second) is True and guard(second, first) is True
        rejects_different = all(guard(first, tensor) is False for tensor in different)
    except (RuntimeError, TypeError):
        return None
    return TensorGuards if accepts_equal and rejects_different else None
