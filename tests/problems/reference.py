"""Attention in float64, in plain torch, and the largest errors that rounding explains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import torch


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention result and its rounding-error bounds.

    ``out[heads, head_dim_vo]``, ``lse[heads]`` in log2 units; ``spread`` is the root of the sum of
    ``(weight * value)^2`` and ``magnitude`` the sum of ``weight * |value|``, shaped like ``out``;
    ``rounding`` and ``lse_rounding`` are the changes of ``out`` and ``lse`` by rounding the inputs
    and by FP8 MMAs; ``small`` is the largest change of ``out`` by small weights in fp16.
    """

    out: torch.Tensor
    lse: torch.Tensor
    spread: torch.Tensor
    magnitude: torch.Tensor
    small: torch.Tensor
    rounding: torch.Tensor
    lse_rounding: torch.Tensor


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    score_scale: float,
    output_scale: float = 1.0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    value_scales: tuple[torch.Tensor, float] | None = None,
    rows_round_to: torch.dtype | None = None,
    score_sums: tuple[tuple[int, int], ...] = (),
    rounds_weights_to_e4m3: bool = False,
) -> Attention:
    """Return attention of ``query[heads, d]`` over ``keys[tokens, d]`` and ``values[tokens, v]``.

    ``sinks[heads]`` are natural-domain logits in the denominator without a value, and
    ``bias[heads or 1, tokens]`` is added to the scaled scores, which ``soft_cap`` caps unless 0. A
    fully masked row gives zeros and the LSE of its sink, minus infinity without one. Query, keys
    and values may each be used rounded to ``rows_round_to``. ``value_scales`` are those of the
    tokens, which multiply weights before they are rounded, and the largest of all tokens of the
    sequence, to which kernels relate them. FP8 MMAs are modeled by
    ``score_sums``, the dims and the steps of each score accumulation, and by FP8 weights.
    """
    query, keys, values = query.double(), keys.double(), values.double()

    def exactly(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> _Exact:
        return _attend(
            query, keys, values, score_scale, output_scale, soft_cap, sinks, bias, value_scales
        )

    result, weights = exactly(query, keys, values)
    if score_sums and len(keys):
        errors = _score_errors(query, keys, score_sums) * abs(score_scale)
        moved, lse_moved = _moved_by(weights, errors, values, rounds_weights_to_e4m3)
        result = replace(result, rounding=moved * abs(output_scale), lse_rounding=lse_moved)
    if rows_round_to is None:
        return result
    rounded = (
        exactly(query.to(rows_round_to).double(), keys, values)[0],
        exactly(query, keys.to(rows_round_to).double(), values)[0],
        exactly(query, keys, values.to(rows_round_to).double())[0],
    )
    by_rows = sum((other.out - result.out).abs() for other in rounded)
    # The error of minus infinity is 0, though a difference of two is NaN.
    by_lse = sum(
        torch.where(result.lse == other.lse, 0.0, (other.lse - result.lse).abs())
        for other in rounded
    )
    return replace(
        result, rounding=result.rounding + by_rows, lse_rounding=result.lse_rounding + by_lse
    )


# FP8 rounding of the weights, ``[heads, tokens]``.
_Exact: TypeAlias = tuple[Attention, torch.Tensor]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    score_scale: float,
    output_scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    value_scales: tuple[torch.Tensor, float] | None,
) -> _Exact:
    logits = query @ keys.T * score_scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + bias.double()
    sees_nothing = (logits == -math.inf).all(dim=1)
    sink = torch.full((len(query), 1), -math.inf, dtype=torch.float64)
    if sinks is not None:
        sink = sinks.double()[:, None]
    lse = torch.logsumexp(torch.cat([logits, sink], dim=1), dim=1)
    # All finite values vanish beside an infinite sink.
    weights = torch.where(sees_nothing[:, None], 0.0, (logits - lse[:, None]).exp())
    zeros = torch.zeros(len(query), values.shape[1], dtype=torch.float64)
    largest = torch.cat([weights, zeros[:, :1]], dim=1).amax(dim=1, keepdim=True)
    scales, largest_scale = value_scales or (torch.ones(len(keys), dtype=torch.float64), 1.0)
    largest = largest * largest_scale
    scaled = weights * scales
    small = torch.where(scaled < largest * 2.0**-14, scaled, 0.0)
    small = torch.minimum(small, largest * 2.0**-25) / scales
    result = Attention(
        out=weights @ values * output_scale,
        lse=lse / math.log(2),
        spread=(weights.square() @ values.square()).sqrt() * abs(output_scale),
        magnitude=weights @ values.abs() * abs(output_scale),
        small=small @ values.abs() * abs(output_scale),
        rounding=zeros,
        lse_rounding=zeros[:, 0],
    )
    return result, weights


def _score_errors(
    query: torch.Tensor, keys: torch.Tensor, sums: tuple[tuple[int, int], ...]
) -> torch.Tensor:
    """Return the error of a score that FP8 MMAs accumulate, ``[heads, tokens]``.

    An MMA adds 32 products and the accumulator, S', each truncated below 2^-13 of the largest power
    of two among them, which is at most |S'|. A truncation is uniform in [0, 2^-13 |S'|] towards
    zero, of products of either sign: 33 have a standard deviation of at most
    sqrt(33 / 3) 2^-13 |S'|. On its way through n steps to S, S' is a random walk whose products
    have the root square sum R, so the sum of S'^2 is about n (S^2 / 3 + R^2 / 6). Products have
    eight bits, and most are not truncated, so in a simulation a third of that is the standard
    deviation, and 2.2 times that the largest of 48000 errors: three times that is returned.
    """
    walked = torch.zeros(len(query), len(keys), dtype=torch.float64)
    first = 0
    for dims, steps in sums:
        own, other = query[:, first : first + dims], keys[:, first : first + dims]
        walked += steps * ((own @ other.T).square() / 3 + own.square() @ other.square().T / 6)
        first += dims
    return torch.as_tensor(3 * 2.0**-13 * (11 * walked).sqrt())


def _moved_by(
    weights: torch.Tensor, errors: torch.Tensor, values: torch.Tensor, rounds_weights_to_e4m3: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the changes of the weighted sum and the LSE by errors of the weights' logarithms.

    The errors are ``errors``, independent of each other. In addition, a weight below 2^-11 of the
    largest is rounded to e4m3 absolutely, by 2^-15 of that or by itself.
    """
    out = weights @ values
    moved = (weights * torch.expm1(errors)).square()
    by_scores = moved @ values.square() - 2 * out * (moved @ values)
    by_scores += out.square() * moved.sum(dim=1, keepdim=True)
    largest = weights.amax(dim=1, keepdim=True)
    small = torch.where(weights < largest * 2.0**-11, weights, 0.0)
    lost = torch.minimum(small, largest * 2.0**-15) * float(rounds_weights_to_e4m3)
    all_lost = lost.sum(dim=1, keepdim=True)
    rounding = by_scores.clamp_min(0).sqrt() + lost @ values.abs() + out.abs() * all_lost
    by_errors = (weights * errors).square().sum(dim=1).sqrt()
    return rounding, (by_errors + all_lost[:, 0]) * math.log2(math.e)


def joined(
    parts: list[Attention], join: Callable[[list[torch.Tensor]], torch.Tensor] = torch.stack
) -> Attention:
    """Return the results of query tokens stacked, or those of head groups by ``torch.cat``."""
    names = [field.name for field in fields(Attention)]
    return Attention(**{name: join([getattr(part, name) for part in parts]) for name in names})


UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float8_e4m3fn: 2.0**-4}


def output_tolerance(
    dtype: torch.dtype, expected: Attention, math_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the largest error that rounding explains, for every element of ``expected.out``.

    The result has ``dtype``, the weights are multiplied as ``math_dtype``, by default the same.
    With u their unit roundoffs and w the weights, out = sum(p v) / sum(p), where

    - rounding the result errs by at most u |out|;
    - every p is rounded to the math dtype, relatively by e_i with |e_i| <= u, the same in numerator
      and denominator, so the result moves by sum(w_i e_i (v_i - out)). The e_i are independent with
      a standard deviation of at most u / sqrt(3): six of them are below 3.5 u times the root of
      sum((w_i (v_i - out))^2), which is at most ``spread + |out|``, and for one token 0;
    - float32 in scores, sums and split weights, and the 2^-22 of ex2.approx, change a weight
      relatively by less than 2^-13 for scores up to 2^8 in log2 units;
    - fp16, which kernels of any dtype may have p in, rounds p below 2^-14 of the largest absolutely
      by 2^-25 of that, or by itself: the oracle sums up the effect into ``small``, which is all
      there is of an element whose large p meet values of 0;
    - with FP8 MMAs, scores err by :func:`_score_errors`, and small weights are lost: the oracle
      computes the effect into ``rounding``;
    - rows with scales are converted to the math dtype. The oracle computes the effect of that:
      ``rounding`` is the sum of the changes by a rounded query, rounded keys and rounded values,
      each alone, since a backend may round any of them; their joint effect differs from the sum by
      products of two roundings.
    """
    if dtype is torch.float8_e4m3fn:  # errs by 2^-4 of the number, or by half of its smallest step
        before = output_tolerance(math_dtype or torch.bfloat16, expected)
        return before + 2.0**-4 * (expected.out.abs() + before) + 2.0**-10
    u_out, u = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[math_dtype or dtype]
    weights = 3.5 * u * expected.spread + 2.0**-13 * expected.magnitude + expected.small
    rows = expected.rounding * (1 + 4 * u)
    return (u_out + u) * expected.out.abs() + weights + rows + 2.0**-20


def lse_tolerance(dtype: torch.dtype, expected: Attention | None = None) -> torch.Tensor:
    """Return the largest error of an LSE in log2 units; ``dtype`` is the dtype of the weights.

    The sum is of P rounded by at most u relatively, u log2(e) in log2 units; float32 scores of up
    to 2^8 err by 2^-24 * 2^8 * sqrt(576), below 2^-11; the oracle computes the effect of rounding
    query and keys. A sink may be of any size, with a float32 error of its own size.
    """
    tolerance = torch.tensor(UNIT_ROUNDOFF[dtype] * math.log2(math.e) + 2.0**-10)
    if expected is None:
        return tolerance
    of_sinks = torch.where(expected.lse.abs() > 2.0**8, expected.lse.abs() * 2.0**-22, 0.0)
    return tolerance + expected.lse_rounding + of_sinks.nan_to_num(posinf=0.0)


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor | float, what: str
) -> None:
    """Fail unless every element is within its tolerance; infinities and NaN must be equal."""
    actual = actual.double().cpu()
    expected = expected.double().cpu()
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    # The difference of two infinities or of NaN is NaN.
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = torch.where(same, torch.zeros_like(actual), (actual - expected).abs())
    bad = ~(same | (error <= tolerance))  # NaN is bad
    if bad.any():
        at = tuple(int(i) for i in bad.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} elements off; first at {at}: "
            f"{actual[at]:.6g}, not {expected[at]:.6g}; largest error {error[bad].max():.3g}"
        )
