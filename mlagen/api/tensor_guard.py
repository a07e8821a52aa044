"""Whether tensors are like others that were seen before, asked of torch in one step.

Reading shape, strides, dtype and device of each from Python costs four times as much. The means are
torch's own for compiled code, and private: where they are missing or not what is expected of them,
there are no guards, and calls are found by their forms alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

Guard = Callable[..., bool]

# Of these, shape and strides are what torch has of them; a subclass may say otherwise.
_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)


def make_guard(tensors: Sequence[torch.Tensor]) -> Guard | None:
    """Return a function of as many tensors that says whether each is like the one in its place.

    It never says so of tensors that differ in class, shape, strides, dtype or device, nor of those
    that require grad while torch records it. It may deny it of others that do not, such as
    inference tensors and others; a tensor in two places is like one in the same two alone. None if
    ``tensors`` themselves would be denied, or nothing can be asked. It must not be asked of nested
    tensors, which torch's guards do not survive.
    """
    if any(tensor.__class__ not in _PLAIN_CLASSES for tensor in tensors):
        return None
    guards = _valid_guards()
    guard = _with_repeats(guards, tensors) if guards is not None else None
    if guard is not None and any(tensor.requires_grad for tensor in tensors):
        guard = _without_grad(guard)
    return guard if guard is not None and guard(*tensors) is True else None


def can_guard() -> bool:
    """Whether there are guards at all."""
    return _valid_guards() is not None


def _without_grad(guard: Guard) -> Guard:
    """Return a guard that denies tensors that require grad, as torch's own do not by grad mode."""
    is_grad_enabled = torch.is_grad_enabled
    return lambda *tensors: not is_grad_enabled() and guard(*tensors)


def _with_repeats(guards: Any, tensors: Sequence[torch.Tensor]) -> Guard | None:
    """Return a guard of tensors of which some may be the same; torch's own deny those."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    own = sorted(places.values())
    guard = _built(guards, [tensors[place] for place in own])
    if guard is None or len(own) == len(tensors):
        return guard
    pairs = [(place, places[id(tensor)]) for place, tensor in enumerate(tensors)]

    def guard_with_repeats(*given: torch.Tensor) -> bool:
        same = all(given[place] is given[other] for place, other in pairs)
        return same and guard(*(given[place] for place in own))

    return guard_with_repeats


def _built(guards: Any, tensors: Sequence[torch.Tensor]) -> Guard | None:
    try:
        guard: Guard = guards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        ).check
    except (AttributeError, RuntimeError, TypeError, ValueError):  # another torch's
        return None
    return guard


@cache
def _valid_guards() -> Any | None:
    """Return torch's class of guards, if it tells apart what must be told apart."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    one, other = torch.zeros((2, 3), device="cpu"), torch.zeros((2, 3), device="cpu")
    guard = _built(TensorGuards, (one, other))
    if guard is None:
        return None
    unlike = (
        None,
        torch.zeros((2, 4), device="cpu"),
        torch.zeros((2, 3, 1), device="cpu"),
        torch.zeros((3, 2), device="cpu").t(),
        torch.zeros((2, 3), device="cpu", dtype=torch.int32),
        torch.zeros((2, 3), device="meta"),
    )
    try:
        sees_the_same = guard(one, other) is True and guard(other, one) is True
        sees_others = all(guard(one, tensor) is False for tensor in unlike)
    except (RuntimeError, TypeError):
        return None
    return TensorGuards if sees_the_same and sees_others else None
