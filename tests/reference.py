"""Attention in float64, plain torch: the only oracle of the tests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What attention gives, and how far roundings of the weights can move it.

    ``out[heads, head_dim_vo]``, ``lse[heads]`` in log2 units; ``spread`` is the root of the sum of
    ``(weight * value)^2`` and ``magnitude`` the sum of ``weight * |value|``, shaped like ``out``.
    """

    out: torch.Tensor
    lse: torch.Tensor
    spread: torch.Tensor
    magnitude: torch.Tensor


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    score_scale: float,
    output_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
) -> Attention:
    """Return attention of ``query[heads, d]`` over ``keys[tokens, d]`` and ``values[tokens, v]``.

    ``sinks[heads]`` are natural-domain logits in the denominator without a value. No tokens give
    zeros and an LSE of minus infinity, sink or not.
    """
    query, keys, values = query.double(), keys.double(), values.double()
    heads = query.shape[0]
    if keys.shape[0] == 0:
        zeros = torch.zeros(heads, values.shape[1], dtype=torch.float64)
        lse = torch.full((heads,), -math.inf, dtype=torch.float64)
        return Attention(out=zeros, lse=lse, spread=zeros, magnitude=zeros)
    logits = query @ keys.T * score_scale
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None]], dim=1)
    weights = torch.softmax(logits, dim=1)[:, : keys.shape[0]]
    return Attention(
        out=weights @ values * output_scale,
        lse=torch.logsumexp(logits, dim=1) / math.log(2),
        spread=(weights.square() @ values.square()).sqrt() * abs(output_scale),
        magnitude=weights @ values.abs() * abs(output_scale),
    )


def stack(parts: list[Attention]) -> Attention:
    """Return the results of many query tokens as one, along a new first dimension."""
    return Attention(
        out=torch.stack([part.out for part in parts]),
        lse=torch.stack([part.lse for part in parts]),
        spread=torch.stack([part.spread for part in parts]),
        magnitude=torch.stack([part.magnitude for part in parts]),
    )


UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def output_tolerance(dtype: torch.dtype, expected: Attention) -> torch.Tensor:
    """Return the largest error that rounding explains, for every element of ``expected.out``.

    With u the unit roundoff of ``dtype`` and w the weights, out = sum(p v) / sum(p), where

    - rounding the result errs by at most u |out|;
    - every p is rounded to ``dtype``, relatively by e_i with |e_i| <= u, the same in numerator and
      denominator, so the result moves by sum(w_i e_i (v_i - out)). The e_i are independent with a
      standard deviation of at most u / sqrt(3): six of them are below 3.5 u times the root of
      sum((w_i (v_i - out))^2), which is at most ``spread + |out|``, and for one token 0;
    - float32 in scores, sums and split weights, and the 2^-22 of ex2.approx, move a weight
      relatively by less than 2^-13 for scores up to 2^8 in log2 units;
    - fp16 loses p below 2^-24 of the largest, and rounds those below 2^-14 absolutely by 2^-25.
    """
    u = UNIT_ROUNDOFF[dtype]
    subnormal = 2.0**-14 if dtype is torch.float16 else 0.0
    weights = 3.5 * u * expected.spread + (2.0**-13 + subnormal) * expected.magnitude
    return 2 * u * expected.out.abs() + weights + 2.0**-20


def lse_tolerance(dtype: torch.dtype) -> float:
    """Return the largest error of an LSE in log2 units.

    The sum is of probabilities rounded by at most u relatively, u log2(e) in log2 units; float32
    scores of up to 2^8 err by 2^-24 * 2^8 * sqrt(576), below 2^-11.
    """
    return UNIT_ROUNDOFF[dtype] * math.log2(math.e) + 2.0**-10


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor | float, what: str
) -> None:
    """Fail unless every element is within its tolerance; infinities must be equal."""
    actual = actual.double().cpu()
    expected = expected.double().cpu()
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    same = actual == expected  # infinities, whose difference is NaN
    error = torch.where(same, torch.zeros_like(actual), (actual - expected).abs())
    bad = ~(error <= tolerance)  # a NaN is bad
    if bad.any():
        at = tuple(int(i) for i in bad.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} elements off; first at {at}: "
            f"{actual[at]:.6g}, not {expected[at]:.6g}; largest error {error[bad].max():.3g}"
        )
