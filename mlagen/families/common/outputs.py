"""Outputs of calls: those that the caller gave, and new ones; and the tensors that it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mlagen.families.common.problem import Problem

Tensors = tuple[torch.Tensor, ...]

# Factors that convert a base-2 LSE to the requested base.
LSE_FACTORS = {"base2": 1.0, "basee": math.log(2)}


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


def new_outputs(
    given: tuple[torch.Tensor | None, ...], specs: list[OutputSpec], device: torch.device
) -> Tensors:
    """Return the outputs of a call, with new ones for those that are None."""
    return tuple(
        new_output(spec.shape, spec.dtype, device) if old is None else old
        for old, spec in zip(given, specs, strict=False)
    )
