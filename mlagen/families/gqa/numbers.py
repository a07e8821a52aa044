"""Conversion of a grouped-query decode call's numbers and tensor pairs to canonical types."""

from __future__ import annotations

import math

import torch

from mlagen.families.common.arguments import (
    INT32_MAX,
    SCALES,
    canonical_scale,
    canonical_sinks,
    reject,
    require_choice,
    require_float32,
    require_tensor,
    require_whole_number,
)
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.validate_kv import LAYOUTS


def canonical_numbers(args: GqaArgs) -> GqaArgs:
    """Return the arguments with built-in Python numbers and fp32 sinks.

    Window and output factors are canonical already: the entry points compute them.

    Raises
    ------
    ArgumentError
        If one has the wrong type, or exceeds 32 bits.
    """
    # By index, as in the signature: names cost more, and every call off the fast path runs this.
    max_seq_len, q_len, layout, _, _, bmm1, bmm2, _, _, sinks = args[6:16]
    if (
        max_seq_len.__class__ is q_len.__class__ is int
        and bmm1.__class__ in SCALES
        and bmm2.__class__ in SCALES
        and layout.__class__ is str
        and layout in LAYOUTS
        and (sinks is None or (sinks.__class__ is torch.Tensor and sinks.dtype is torch.float32))
        and 0 <= max_seq_len <= INT32_MAX
        and 1 <= q_len <= INT32_MAX
    ):
        return args
    names = args.names
    return args._replace(
        max_seq_len=require_whole_number(max_seq_len, names.max_seq_len),
        q_len=require_whole_number(q_len, names.q_len, min_value=1),
        kv_layout=require_choice(layout, "kv_layout", LAYOUTS),
        bmm1_scale=canonical_scale(bmm1, names.bmm1_scale),
        bmm2_scale=canonical_scale(bmm2, names.bmm2_scale),
        sinks=None if sinks is None else canonical_sinks(sinks),
    )


def pair_of(
    kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor], argument: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return keys and values; the values are None where one tensor holds both.

    Raises
    ------
    ArgumentError
        If a tuple or list holds anything but two tensors.
    """
    if not isinstance(kv, (tuple, list)):
        return kv, None
    if len(kv) != 2:
        reject(argument, "a tensor, or two in a tuple or list", f"{len(kv)} of them")
    key, value = kv
    if key.__class__ is torch.Tensor and value.__class__ is torch.Tensor:
        return key, value
    return require_tensor(key, f"{argument}[0]"), require_tensor(value, f"{argument}[1]")


def window_of(window_left: object, argument: str) -> int:
    """Return the window: tokens that a row attends to, including itself; 0 is no limit.

    Raises
    ------
    ArgumentError
        If it is no whole number.
    """
    left = require_whole_number(window_left, argument, min_value=None, max_value=None)
    return left + 1 if left >= 0 else 0


def positive_factor(number: object, argument: str) -> float:
    """Return a positive factor in the range of float32.

    Raises
    ------
    ArgumentError
        If it is not a finite number above 0.
    """
    if number.__class__ is float and 1e-30 < number < 1e30:
        return number
    factor = require_float32(number, argument)
    if not 0 < factor < math.inf:
        reject(argument, "a finite number above 0", factor)
    return factor
