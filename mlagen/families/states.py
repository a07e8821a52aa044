"""Combine of attention states over disjoint keys, by a kernel or in torch ops."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from mlagen.engine import kernel_for
from mlagen.families.common.arguments import (
    DTYPES,
    require_device,
    require_dims,
    require_dtype,
    require_shape,
    require_tensor,
)
from mlagen.families.common.launchers import LSE_FACTORS
from mlagen.runtime.device import arch_of_device
from mlagen.runtime.launch import launch
from mlagen.runtime.packing import ParameterPacking
from mlagen.spec.arch import Arch
from mlagen.spec.combine import LANE_DIMS, CombineStatesSpec, combine_states_spec
from mlagen.spec.dtype import DType

_LANE_BYTES = LANE_DIMS * 2

VALUE_DTYPES = (*DTYPES, torch.float32)


def check_values(value: object, argument: str, dims: int) -> torch.Tensor:
    """Return partial outputs of ``dims`` dimensions.

    Raises
    ------
    ArgumentError
        If they break a rule.
    """
    values = require_tensor(value, argument)
    require_dims(values, argument, (dims,))
    require_dtype(values, argument, VALUE_DTYPES)
    return values


def check_like(value: object, argument: str, values: torch.Tensor, of: str) -> torch.Tensor:
    """Return partial outputs like ``values``.

    Raises
    ------
    ArgumentError
        If they differ in device, dtype or shape.
    """
    other = check_values(value, argument, values.dim())
    require_device(other, argument, values.device)
    require_dtype(other, argument, (values.dtype,), f"dtype of {of}")
    require_shape(other, argument, (tuple(values.shape),), of)
    return other


def check_lse(value: object, argument: str, values: torch.Tensor, of: str) -> torch.Tensor:
    """Return the LSE of the rows of ``values`` in fp32; another floating-point dtype is converted.

    Raises
    ------
    ArgumentError
        If it breaks a rule.
    """
    lse = require_tensor(value, argument)
    require_device(lse, argument, values.device)
    require_dtype(lse, argument, (torch.float32, *DTYPES, torch.float64))
    require_shape(lse, argument, (tuple(values.shape[:-1]),), f"rows of {of}")
    return lse.float()


class States(NamedTuple):
    """Partial outputs with their LSE, of any strides."""

    out: torch.Tensor  # [n, heads, dim], or [n, states, heads, dim]
    lse: torch.Tensor  # [n, heads], or [n, states, heads]


def combine_states(
    first: States,
    others: States,
    base: str,
    *,
    into: States | None = None,
    mask: torch.Tensor | None = None,
    by_kernel: bool = True,
) -> States:
    """Return the state of each row over the keys of all its states, ``others`` in their order.

    The result is written into ``into`` where ``mask`` is true, or else is new. A state of weight
    zero adds nothing, even NaN.
    """
    target = into or States(
        torch.empty_like(first.out, memory_format=torch.contiguous_format),
        torch.empty_like(first.lse, memory_format=torch.contiguous_format),
    )
    plan = _plan_of(first, others, target) if by_kernel else None
    if plan is not None:
        _launch(plan, first, others, base, target, mask)
        return target
    out, lse = _combined(
        torch.cat((first.out[:, None], others.out), dim=1),
        torch.cat((first.lse[:, None], others.lse), dim=1),
        base,
    )
    if mask is not None:
        out = torch.where(mask[:, None, None], out, first.out)
        lse = torch.where(mask[:, None], lse, first.lse)
    if into is None:
        return States(out, lse)
    return States(into.out.copy_(out), into.lse.copy_(lse))


def _combined(
    values: torch.Tensor, lse: torch.Tensor, base: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE of ``values[n, states, heads, dim]`` in torch ops."""
    unit = math.log2(math.e) if base == "basee" else 1.0
    # FlashMLA and FlashAttention-2 have plus infinity for a row without keys.
    lse = lse.masked_fill(lse == math.inf, -math.inf)
    largest = lse.amax(dim=1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0.0)  # no difference of infinities
    weights = torch.exp2((lse - largest) * unit)
    total = weights.sum(dim=1)
    weights, has_weight = weights[..., None], (weights != 0.0)[..., None]
    out = (values.float().masked_fill(~has_weight, 0.0) * weights).sum(dim=1)
    out = out / total.masked_fill(total == 0.0, 1.0)[..., None]
    return out.to(values.dtype), largest.squeeze(1) + total.log2() / unit


class _Plan(NamedTuple):
    """The kernel of a call, and the parameters that follow from shapes and strides."""

    spec: CombineStatesSpec
    num_ctas: int
    constants: bytes


def _plan_of(first: States, others: States, target: States) -> _Plan | None:
    """Return the plan, or None if torch ops compute the result."""
    out, gpu = first.out, _gpu_of(first.out)
    if gpu is None or out.dtype not in DTYPES or not out.numel():
        return None
    is_aligned = not any(state.out.data_ptr() % _LANE_BYTES for state in (first, others, target))
    strides = tuple(tensor.stride() for state in (first, others, target) for tensor in state)
    arch, dtype, shape = arch_of_device(gpu), DTYPES[out.dtype], tuple(out.shape)
    return _plan(arch, dtype, shape, others.out.shape[1], strides) if is_aligned else None


@lru_cache(maxsize=4096)
def _plan(
    arch: Arch,
    dtype: DType,
    shape: tuple[int, ...],
    num_others: int,
    strides: tuple[tuple[int, ...], ...],
) -> _Plan | None:
    n, heads, head_dim = shape
    spec = combine_states_spec(arch, dtype, head_dim)
    row_strides = [stride for of_out in strides[::2] for stride in of_out[:-1]]
    is_dense = all(of_out[-1] == 1 for of_out in strides[::2])
    if spec is None or not is_dense or any(stride * 2 % _LANE_BYTES for stride in row_strides):
        return None
    values = {"total_rows": n * heads, "heads": heads, "num_others": num_others}
    names = ("first_out", "first_lse", "other_out", "other_lse", "out", "lse")
    for name, of_tensor in zip(names, strides, strict=True):
        values |= _strides(name, of_tensor)
    num_ctas = -(-n * heads * 32 // spec.threads)
    return _Plan(spec, num_ctas, ParameterPacking(spec).pack_constants(values))


def _gpu_of(tensor: torch.Tensor) -> int | None:
    index: int = tensor.device.index
    return index if tensor.device.type == "cuda" else None


def _launch(
    plan: _Plan,
    first: States,
    others: States,
    base: str,
    target: States,
    mask: torch.Tensor | None,
) -> None:
    launch(
        kernel_for(plan.spec, first.out.device.index),
        plan.num_ctas,
        True,
        (
            first.out.data_ptr(),
            first.lse.data_ptr(),
            others.out.data_ptr(),
            others.lse.data_ptr(),
            0 if mask is None else mask.data_ptr(),
            target.out.data_ptr(),
            target.lse.data_ptr(),
            plan.constants,
            LSE_FACTORS[base],
        ),
    )


def _strides(name: str, strides: tuple[int, ...]) -> dict[str, int]:
    """Return the strides of rows, states if any, and heads, by parameter."""
    found = {f"{name}_stride": strides[0]}
    has_states = name.startswith("other")
    if has_states:
        found[f"{name}_state_stride"] = strides[1]
    return found | {f"{name}_head_stride": strides[2 if has_states else 1]}
