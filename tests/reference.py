"""Attention in float64, plain torch: the only oracle of the tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What attention gives, and how far roundings can move it.

    ``out[heads, head_dim_vo]``, ``lse[heads]`` in log2 units; ``spread`` is the root of the sum of
    ``(weight * value)^2`` and ``magnitude`` the sum of ``weight * |value|``, shaped like ``out``;
    ``rounding`` and ``lse_rounding`` are what rounding the rows moves ``out`` and ``lse`` by.
    """

    out: torch.Tensor
    lse: torch.Tensor
    spread: torch.Tensor
    magnitude: torch.Tensor
    rounding: torch.Tensor
    lse_rounding: torch.Tensor


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    score_scale: float,
    output_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    rows_round_to: torch.dtype | None = None,
) -> Attention:
    """Return attention of ``query[heads, d]`` over ``keys[tokens, d]`` and ``values[tokens, v]``.

    ``sinks[heads]`` are natural-domain logits in the denominator without a value, and
    ``bias[heads or 1, tokens]`` is added to the scaled scores. A row that sees no token gives zeros
    and an LSE of minus infinity, sink or not. Query, keys and values may each be used rounded to
    ``rows_round_to``.
    """
    query, keys, values = query.double(), keys.double(), values.double()

    def exactly(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Attention:
        return _attend(query, keys, values, score_scale, output_scale, sinks, bias)

    result = exactly(query, keys, values)
    if rows_round_to is None:
        return result
    rounded = (
        exactly(query.to(rows_round_to).double(), keys, values),
        exactly(query, keys.to(rows_round_to).double(), values),
        exactly(query, keys, values.to(rows_round_to).double()),
    )
    by_rows = sum((other.out - result.out).abs() for other in rounded)
    # Minus infinity moves by nothing, though a difference of two is NaN.
    by_lse = sum(
        torch.where(result.lse == other.lse, 0.0, (other.lse - result.lse).abs())
        for other in rounded
    )
    return Attention(
        out=result.out,
        lse=result.lse,
        spread=result.spread,
        magnitude=result.magnitude,
        rounding=torch.as_tensor(by_rows),
        lse_rounding=torch.as_tensor(by_lse),
    )


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    score_scale: float,
    output_scale: float,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Attention:
    logits = query @ keys.T * score_scale
    if bias is not None:
        logits = logits + bias.double()
    sees_nothing = (logits == -math.inf).all(dim=1)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None]], dim=1)
    if logits.shape[1] == 0:
        logits = torch.full((len(query), 1), -math.inf, dtype=torch.float64)
    weights = torch.softmax(logits, dim=1)[:, : keys.shape[0]]
    weights = torch.where(sees_nothing[:, None], 0.0, weights)
    lse = torch.logsumexp(logits, dim=1) / math.log(2)
    zeros = torch.zeros(len(query), values.shape[1], dtype=torch.float64)
    return Attention(
        out=weights @ values * output_scale,
        lse=torch.where(sees_nothing, -math.inf, lse),
        spread=(weights.square() @ values.square()).sqrt() * abs(output_scale),
        magnitude=weights @ values.abs() * abs(output_scale),
        rounding=zeros,
        lse_rounding=zeros[:, 0],
    )


def stack(parts: list[Attention]) -> Attention:
    """Return the results of many query tokens as one, along a new first dimension."""
    names = [field.name for field in fields(Attention)]
    return Attention(**{name: torch.stack([getattr(p, name) for p in parts]) for name in names})


UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float8_e4m3fn: 2.0**-4}


def output_tolerance(
    dtype: torch.dtype, expected: Attention, math_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the largest error that rounding explains, for every element of ``expected.out``.

    The result is of ``dtype``, the weights are multiplied as ``math_dtype``, the same unless it is
    given. With u their unit roundoffs and w the weights, out = sum(p v) / sum(p), where

    - rounding the result errs by at most u |out|;
    - every p is rounded to the math dtype, relatively by e_i with |e_i| <= u, the same in numerator
      and denominator, so the result moves by sum(w_i e_i (v_i - out)). The e_i are independent with
      a standard deviation of at most u / sqrt(3): six of them are below 3.5 u times the root of
      sum((w_i (v_i - out))^2), which is at most ``spread + |out|``, and for one token 0;
    - float32 in scores, sums and split weights, and the 2^-22 of ex2.approx, move a weight
      relatively by less than 2^-13 for scores up to 2^8 in log2 units;
    - fp16 loses p below 2^-24 of the largest, and rounds those below 2^-14 absolutely by 2^-25;
    - e4m3 rounds p below 2^-11 of the largest absolutely, by 2^-15 of it: N tokens together move
      the result by about sqrt(N) 2^-15 of what the largest gives. Up to N = 2^17 that is a
      twentieth of 3.5 u, so it needs no term;
    - rows that are stored with scales are decoded to the math dtype. That rounding is not left to
      chance: the oracle computes it. ``rounding`` is what a rounded query, rounded keys and rounded
      values, each alone, move the result by, summed, for a backend may round any of them; what they
      do together differs from the sum by products of two roundings.
    """
    u_out, u = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[math_dtype or dtype]
    subnormal = 2.0**-14 if (math_dtype or dtype) is torch.float16 else 0.0
    weights = 3.5 * u * expected.spread + (2.0**-13 + subnormal) * expected.magnitude
    rows = expected.rounding * (1 + 4 * u)
    return (u_out + u) * expected.out.abs() + weights + rows + 2.0**-20


def lse_tolerance(dtype: torch.dtype, expected: Attention | None = None) -> torch.Tensor:
    """Return the largest error of an LSE in log2 units; ``dtype`` is what weights are rounded to.

    The sum is of probabilities rounded by at most u relatively, u log2(e) in log2 units; float32
    scores of up to 2^8 err by 2^-24 * 2^8 * sqrt(576), below 2^-11; rounding query and keys moves
    it by what it moves it.
    """
    tolerance = torch.tensor(UNIT_ROUNDOFF[dtype] * math.log2(math.e) + 2.0**-10)
    return tolerance if expected is None else tolerance + expected.lse_rounding


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
