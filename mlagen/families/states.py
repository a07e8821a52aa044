"""Merge of partial attention states, outputs with their LSE, in torch ops."""

from __future__ import annotations

import math

import torch

from mlagen.families.common.arguments import (
    DTYPES,
    require_device,
    require_dims,
    require_dtype,
    require_shape,
    require_tensor,
)

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
    """Return the LSE of the rows of ``values``, of any floating-point dtype.

    Raises
    ------
    ArgumentError
        If it breaks a rule.
    """
    lse = require_tensor(value, argument)
    require_device(lse, argument, values.device)
    require_dtype(lse, argument, (torch.float32, *DTYPES, torch.float64))
    require_shape(lse, argument, (tuple(values.shape[:-1]),), f"rows of {of}")
    return lse


def merge_partials(
    values: torch.Tensor, lse: torch.Tensor, base: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE of ``values[n, parts, heads, dim]`` with ``lse[n, parts, heads]``.

    A part of weight zero adds nothing, even NaN.
    """
    if values.shape[1] == 0:
        n, _, heads, dim = values.shape
        return values.new_zeros(n, heads, dim), values.new_full(
            (n, heads), -math.inf, dtype=torch.float32
        )
    unit = math.log2(math.e) if base == "basee" else 1.0
    # FlashMLA and FlashAttention-2 have plus infinity for a row without keys.
    lse = lse.float().masked_fill(lse == math.inf, -math.inf)
    largest = lse.amax(dim=1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0.0)  # no difference of infinities
    weights = torch.exp2((lse - largest) * unit)
    total = weights.sum(dim=1)
    weights, has_weight = weights[..., None], (weights != 0.0)[..., None]
    out = (values.float().masked_fill(~has_weight, 0.0) * weights).sum(dim=1)
    out = out / total.masked_fill(total == 0.0, 1.0)[..., None]
    return out.to(values.dtype), largest.squeeze(1) + total.log2() / unit
