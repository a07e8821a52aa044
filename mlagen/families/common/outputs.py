"""Outputs of calls: those that the caller gave, and new ones; and the tensors that it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from mlagen.families.common.call_cache import Tensors, pointers_of
from mlagen.families.common.call_key import CallKey
from mlagen.families.common.problem import Problem

# Factors that convert a base-2 LSE to the requested base.
LSE_FACTORS = {"base2": 1.0, "basee": math.log(2)}

Getter = Callable[[tuple[torch.Tensor | None, ...]], Tensors]


class OutputSpec(NamedTuple):
    """An output of a call, and the tensor that the caller gave for it."""

    name: str
    given: torch.Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype


class Computed(NamedTuple):
    """Tensors that an entry point computes for the kernels at every call."""

    tensors: Tensors
    computed_of: Callable[..., Tensors]  # compute them from the tensors of the key


NOTHING = Computed((), lambda *_: ())


def output_specs(args: Any, problem: Problem) -> list[OutputSpec]:
    """Return the requested outputs."""
    out = OutputSpec("out", args.out, problem.out_shape, problem.out_dtype)
    if not args.return_lse:
        return [out]
    return [out, OutputSpec("lse", args.lse, problem.lse_shape, torch.float32)]


def new_output(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized output."""
    return torch.empty(shape, dtype=dtype, device=device)


def stored(results: Tensors, specs: list[OutputSpec]) -> Tensors:
    """Return the requested results, in the outputs that the caller gave."""
    shaped = [(result.view(spec.shape), spec) for result, spec in zip(results, specs, strict=False)]
    return tuple(new if spec.given is None else spec.given.copy_(new) for new, spec in shaped)


def getter_of(
    key: CallKey,
    inputs: Tensors,
    specs: list[OutputSpec],
    device: torch.device,
    computed: Computed,
) -> Getter | None:
    """Return a getter of the outputs of a replay from those that the caller gave.

    None if the kernels read ``inputs``, or write outputs, in other memory than that of the
    arguments, such as a converted tensor, or an output that is copied afterwards.
    """
    _, _, tensors, given = key
    outputs = [spec.given for spec in specs if spec.given is not None]
    used, known = {*pointers_of((*inputs, *outputs))}, pointers_of((*tensors, *computed.tensors))
    if not used.issubset(known) or len(given) < len(specs):
        return None
    if any((old is None) != (spec.given is None) for old, spec in zip(given, specs, strict=False)):
        return None
    if all(spec.given is not None for spec in specs):
        return itemgetter(slice(len(specs)))
    return partial(new_outputs, specs=[spec._replace(given=None) for spec in specs], device=device)


def new_outputs(
    given: tuple[torch.Tensor | None, ...], specs: list[OutputSpec], device: torch.device
) -> Tensors:
    """Return the outputs of a call, with new ones for those that are None."""
    return tuple(
        new_output(spec.shape, spec.dtype, device) if old is None else old
        for old, spec in zip(given, specs, strict=False)
    )
