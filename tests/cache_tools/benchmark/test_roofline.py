"""Roofline bounds of cases."""

from __future__ import annotations

import pytest

from cache_tools.benchmark.roofline import Ceilings
from cache_tools.benchmark.selection import case_of

CEILINGS = Ceilings(read_gb_s=4000.0, bf16_tflop_s=800.0, fp8_tflop_s=1600.0)


def test_many_heads_are_bound_by_math() -> None:
    """128 heads share a token: 146 GFLOP at 800 TFLOP/s take longer than 640 MB at 4 TB/s."""
    case = case_of("mla")

    assert CEILINGS.bound_us(case) == pytest.approx(146_028_888_064 / 800e12 * 1e6)
    assert CEILINGS.bound_by(case) == "math"


def test_few_heads_are_bound_by_memory() -> None:
    """A GQA group of 8 heads reads 2.15 GB with few FLOP per byte."""
    case = case_of("gqa")

    assert CEILINGS.bound_us(case) == pytest.approx(2_151_677_952 / 4e12 * 1e6)
    assert CEILINGS.bound_by(case) == "memory"


def test_e4m3_under_e4m3_has_the_fp8_rate() -> None:
    """The rate is FP8 if the GPU has it, else that of bf16."""
    case = case_of("mla", dtype="e4m3")
    without = Ceilings(read_gb_s=4000.0, bf16_tflop_s=800.0)

    assert CEILINGS.math_us(case) == pytest.approx(146_028_888_064 / 1600e12 * 1e6)
    assert without.math_us(case) == pytest.approx(2 * CEILINGS.math_us(case))


def test_an_e4m3_cache_alone_has_the_rate_of_its_query() -> None:
    """Its elements are converted, and multiplied as bf16."""
    case = case_of("mla", kv_dtype="e4m3")

    assert CEILINGS.math_us(case) == pytest.approx(146_028_888_064 / 800e12 * 1e6)
