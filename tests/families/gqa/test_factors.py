"""Factors of scores and outputs by entry point and dtype; needs no GPU."""

from __future__ import annotations

import math

import pytest

from tests.families.gqa_launches import args_of, launches_of, xqa_args_of
from tests.problems.gqa import GqaCase
from tests.problems.problem import E4M3


@pytest.mark.parametrize(
    ("case", "factors"),
    [
        (GqaCase(name="", seq_lens=(70,), o_scale=0.3), (1.0, 0, 2.0, 0.3)),
        (GqaCase(name="", seq_lens=(70,), o_scale=0.3, kv="int8"), (1.0, 0, 2.0, 0.3)),
        (
            GqaCase(name="", seq_lens=(70,), o_scale=0.3, kv="e4m3", out_dtype=E4M3),
            (1.0, 0, 2.0, 1.0),
        ),
    ],
    ids=["16 bits", "int8", "to e4m3"],
)
def test_factors_of_the_batch_decode(
    case: GqaCase, factors: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``o_scale`` multiplies a 16-bit output, and no other factor applies."""
    inputs = args_of(case, monkeypatch, bmm2_scale=2.0)

    _, _, launches = launches_of(inputs, monkeypatch)

    values = launches[0][3]
    names = ("score_factor", "scores_take_bmm2", "bmm2_scale", "output_factor")
    assert tuple(values[name] for name in names) == factors


@pytest.mark.parametrize(
    ("case", "factors"),
    [
        (GqaCase(name="", seq_lens=(70,)), (0, 1.0, 1.0)),
        (GqaCase(name="", seq_lens=(70,), kv="int8"), (1, 2.0, 1.0)),
        (GqaCase(name="", seq_lens=(70,), kv="nvfp4"), (1, 2.0, 1.0)),
        (GqaCase(name="", seq_lens=(70,), kv="e4m3", out_dtype=E4M3), (1, 2.0, 4.0)),
    ],
    ids=["16 bits", "int8", "nvfp4", "to e4m3"],
)
def test_factors_of_xqa(
    case: GqaCase, factors: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are multiplied by 1 / sqrt(head_dim), and by kv_scale if the cache is quantised."""
    inputs = xqa_args_of(case, monkeypatch, bmm2_scale=2.0)

    _, _, launches = launches_of(inputs, monkeypatch)

    values = launches[0][3]
    names = ("scores_take_bmm2", "bmm2_scale", "output_factor")
    assert tuple(values[name] for name in names) == factors
    assert math.isclose(values["score_factor"], 128**-0.5)
