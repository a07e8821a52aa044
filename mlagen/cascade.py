"""Combines attention states over disjoint keys: the functions of ``flashinfer.cascade``.

A state is the output of attention over some keys, and the LSE of its scores. States of one row over
disjoint keys combine into the state over all of them, such as those of the ranks of decode context
parallel, or of a shared prefix and the rest of each request. A kernel computes it, or torch ops.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from mlagen.engine import kernel_for
from mlagen.families.common.arguments import (
    DTYPES,
    require,
    require_device,
    require_dims,
    require_dtype,
    require_shape,
    require_tensor,
)
from mlagen.families.common.launchers import LSE_FACTORS
from mlagen.families.common.memory import overlap, require_writable
from mlagen.families.common.no_backward import wants_grad
from mlagen.runtime.device import arch_of_device
from mlagen.runtime.launch import launch
from mlagen.runtime.packing import ParameterPacking
from mlagen.spec.arch import Arch
from mlagen.spec.combine import LANE_DIMS, CombineStatesSpec, combine_states_spec
from mlagen.spec.dtype import DType
from mlagen.torch_ops.traced import is_compiling, is_traced, require_eager_memory
from mlagen.values import require_choice

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]

_LANE_BYTES = LANE_DIMS * 2

VALUE_DTYPES = (*DTYPES, torch.float32)


def merge_state(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    *,
    base: str = "base2",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine two attention states.

    Arithmetic is in fp32, with one rounding of the output. A state whose LSE is minus infinity, or
    plus infinity, has no keys: its output is not used, even NaN. Two of them give zeros, and minus
    infinity.

    Parameters
    ----------
    v_a, v_b : bf16, fp16 or fp32 [n, heads, head_dim]
        Outputs over two disjoint sets of keys, of one dtype and any strides.
    s_a, s_b : fp32 [n, heads]
        Their LSE; another floating-point dtype is converted.
    base : str
        ``base2`` or ``basee``: the base of the logarithms, that of the results too.

    Returns
    -------
    tuple of torch.Tensor
        The output ``[n, heads, head_dim]`` and its LSE, fp32 ``[n, heads]``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.

    Notes
    -----
    Signature of ``flashinfer.cascade.merge_state``, with ``base``.
    """
    require_choice(base, "base", LSE_FACTORS)
    require_eager_memory(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    v_a = check_values(v_a, "v_a", 3)
    v_b = check_like(v_b, "v_b", v_a, "v_a")
    s_a, s_b = check_lse(s_a, "s_a", v_a, "v_a"), check_lse(s_b, "s_b", v_a, "v_a")
    out, lse = combine_states(States(v_a, s_a), States(v_b[:, None], s_b[:, None]), base)
    return out, lse


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    base: str = "base2",
) -> None:
    """Combine another attention state into a state, as :func:`merge_state` does.

    Parameters
    ----------
    v : bf16, fp16 or fp32 [n, heads, head_dim]
        Output of the state, overwritten.
    s : fp32 [n, heads]
        Its LSE, overwritten.
    v_other : [n, heads, head_dim]
        Output of the other state, of the dtype of ``v``.
    s_other : fp32 [n, heads]
        Its LSE; another floating-point dtype is converted.
    mask : bool or uint8 [n]
        Where it is false the state stays as it is.
    base : str
        ``base2`` or ``basee``: the base of the logarithms.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule, or the state shares memory with the other one.

    Notes
    -----
    Signature of ``flashinfer.cascade.merge_state_in_place``, with ``base``. FlashInfer converts an
    ``s`` of another dtype, and leaves the caller's unchanged.
    """
    require_choice(base, "base", LSE_FACTORS)
    require_eager_memory(v=v, s=s, v_other=v_other, s_other=s_other, mask=mask)
    v = check_values(v, "v", 3)
    require_dtype(require_tensor(s, "s"), "s", (torch.float32,))
    s = check_lse(s, "s", v, "v")
    v_other = check_like(v_other, "v_other", v, "v")
    s_other = check_lse(s_other, "s_other", v, "v")
    require_writable(v, "v")
    require_writable(s, "s")
    for given, argument, other in ((v_other, "v_other", v), (s_other, "s_other", s)):
        require(not overlap(given, other), argument, "other memory than the state's", "the same")
    if mask is not None:
        mask = require_tensor(mask, "mask")
        require_device(mask, "mask", v.device)
        require_dtype(mask, "mask", (torch.bool, torch.uint8))
        require_shape(mask, "mask", ((len(v),),), "n")
        mask = mask.bool().contiguous()
    combine_states(
        States(v, s),
        States(v_other[:, None], s_other[:, None]),
        base,
        into=States(v, s),
        mask=mask,
    )


def merge_states(
    v: torch.Tensor, s: torch.Tensor, *, base: str = "base2"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine any number of attention states, in their order, as :func:`merge_state` does.

    Parameters
    ----------
    v : bf16, fp16 or fp32 [n, states, heads, head_dim]
        Outputs over disjoint sets of keys, of any strides. No states give zeros.
    s : fp32 [n, states, heads]
        Their LSE; another floating-point dtype is converted.
    base : str
        ``base2`` or ``basee``: the base of the logarithms, that of the results too.

    Returns
    -------
    tuple of torch.Tensor
        The output ``[n, heads, head_dim]`` and its LSE, fp32 ``[n, heads]``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.

    Notes
    -----
    Signature of ``flashinfer.cascade.merge_states``, with ``base``.
    """
    require_choice(base, "base", LSE_FACTORS)
    require_eager_memory(v=v, s=s)
    v = check_values(v, "v", 4)
    s = check_lse(s, "s", v, "v")
    if not v.shape[1]:
        n, _, heads, head_dim = v.shape
        out = v.new_zeros(n, heads, head_dim)
        return out, s.new_full((n, heads), -math.inf)
    out, lse = combine_states(States(v[:, 0], s[:, 0]), States(v[:, 1:], s[:, 1:]), base)
    return out, lse


def check_values(value: object, argument: str, dims: int) -> torch.Tensor:
    """Return partial outputs of ``dims`` dimensions."""
    values = require_tensor(value, argument)
    require_dims(values, argument, (dims,))
    require_dtype(values, argument, VALUE_DTYPES)
    return values


def check_like(value: object, argument: str, values: torch.Tensor, of: str) -> torch.Tensor:
    """Return partial outputs like ``values``.

    Raises ArgumentError if they differ in device, dtype or shape.
    """
    other = check_values(value, argument, values.dim())
    require_device(other, argument, values.device)
    require_dtype(other, argument, (values.dtype,), f"dtype of {of}")
    require_shape(other, argument, (tuple(values.shape),), of)
    return other


def check_lse(value: object, argument: str, values: torch.Tensor, of: str) -> torch.Tensor:
    """Return the LSE of the rows of ``values``, converted to fp32 if it has another dtype."""
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
) -> States:
    """Return the state of each row over the keys of all its states, ``others`` in their order.

    The result is written into ``into`` where ``mask`` is true, or else is new. A state of weight
    zero adds nothing, even NaN. No kernel computes what is traced or needs a gradient.
    """
    target = into or States(
        torch.empty_like(first.out, memory_format=torch.contiguous_format),
        torch.empty_like(first.lse, memory_format=torch.contiguous_format),
    )
    needs_torch = is_compiling() or is_traced() or wants_grad((first.out, others.out))
    plan = None if needs_torch else _plan_of(first, others, target)
    if plan is not None:
        kernel = kernel_for(plan.spec, first.out.device.index)
        places = [tensor.data_ptr() for state in (first, others, target) for tensor in state]
        places.insert(4, 0 if mask is None else mask.data_ptr())
        values: tuple[float | bytes, ...] = (*places, plan.constants, LSE_FACTORS[base])
        launch(kernel, plan.num_ctas, True, values)
        return target
    out, lse = _combined_by_torch(
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


def _combined_by_torch(
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
        axes = ("", "_state", "_head") if name.startswith("other") else ("", "_head")
        pairs = zip(axes, of_tensor, strict=False)  # an output has dense dims, too
        values |= {f"{name}{axis}_stride": stride for axis, stride in pairs}
    num_ctas = -(-n * heads * 32 // spec.threads)
    return _Plan(spec, num_ctas, ParameterPacking(spec).pack_constants(values))


def _gpu_of(tensor: torch.Tensor) -> int | None:
    index: int = tensor.device.index
    return index if tensor.device.type == "cuda" else None
