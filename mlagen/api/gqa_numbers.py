"""The pairs and numbers of a grouped-query decode call, made plain before they are used."""

from __future__ import annotations

import math

import torch

from mlagen.api.arguments import (
    INT32_MAX,
    SCALES,
    plain_scale,
    plain_sinks,
    reject,
    require_choice,
    require_float32,
    require_tensor,
    require_whole_number,
)
from mlagen.api.gqa_args import GqaArgs
from mlagen.api.gqa_cache import LAYOUTS


def with_plain_numbers(args: GqaArgs) -> GqaArgs:
    """Return the inputs with Python's own numbers, and with sinks of fp32.

    Window and output factors are plain already: their entry points compute them.

    Raises
    ------
    ArgumentError
        If one is not of its kind, or a kernel's 32 bits cannot hold it.
    """
    # By position, as in the form: names cost more, and this runs at every call but the usual.
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
        q_len=require_whole_number(q_len, names.q_len, least=1),
        kv_layout=require_choice(layout, "kv_layout", LAYOUTS),
        bmm1_scale=plain_scale(bmm1, names.bmm1_scale),
        bmm2_scale=plain_scale(bmm2, names.bmm2_scale),
        sinks=None if sinks is None else plain_sinks(sinks),
    )


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
        reject(argument, "a tensor, or two in a tuple or list", f"{len(both)} of them")
    key, value = both
    if key.__class__ is torch.Tensor and value.__class__ is torch.Tensor:
        return key, value
    return require_tensor(key, f"{argument}[0]"), require_tensor(value, f"{argument}[1]")


def window_of(window_left: object, argument: str) -> int:
    """Return how many tokens a row sees, its own included, of those before it; 0 is no limit.

    Raises
    ------
    ArgumentError
        If it is no whole number.
    """
    before = require_whole_number(window_left, argument, least=None, most=None)
    return before + 1 if before >= 0 else 0


def positive_factor(number: object, argument: str) -> float:
    """Return a factor that float32 can hold.

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
