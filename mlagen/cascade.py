"""Combines attention states over disjoint keys: the functions of ``flashinfer.cascade``.

A state is the output of attention over some keys, and the LSE of its scores. States of one row over
disjoint keys combine into the state over all of them, such as those of the ranks of decode context
parallel, or of a shared prefix and the rest of each request.
"""

from __future__ import annotations

import math

import torch

from mlagen.families.common.arguments import (
    require,
    require_device,
    require_dtype,
    require_shape,
    require_tensor,
)
from mlagen.families.common.launchers import LSE_FACTORS
from mlagen.families.common.memory import overlap, require_writable
from mlagen.families.common.no_backward import wants_grad
from mlagen.families.states import (
    States,
    check_like,
    check_lse,
    check_values,
    combine_states,
)
from mlagen.torch_ops.traced import is_compiling, is_traced, require_eager_memory
from mlagen.values import require_choice

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]


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
    return _combined(States(v_a, s_a), States(v_b[:, None], s_b[:, None]), base)


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
        by_kernel=_may_launch(v, v_other),
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
    return _combined(States(v[:, 0], s[:, 0]), States(v[:, 1:], s[:, 1:]), base)


def _combined(first: States, others: States, base: str) -> tuple[torch.Tensor, torch.Tensor]:
    by_kernel = _may_launch(first.out, others.out)
    out, lse = combine_states(first, others, base, by_kernel=by_kernel)
    return out, lse


def _may_launch(*tensors: torch.Tensor) -> bool:
    """Whether a kernel may compute the result: nothing traces the call or needs a gradient."""
    return not (is_compiling() or is_traced() or wants_grad(tensors))
