"""Factors of scores and outputs by entry point and dtype; needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families.gqa_launches import args_of, launches_of, xqa_args_of
from tests.problems.gqa import GqaCase
from tests.problems.problem import E4M3

TO_E4M3 = {"kv": "e4m3", "out_dtype": E4M3}
ROOT = 128**-0.5


@pytest.mark.parametrize(
    ("entry", "changes", "factors"),
    [
        # An o_scale multiplies a 16-bit output, and no other factor applies.
        (args_of, {}, (1.0, 0, 2.0, 0.3)),
        (args_of, {"kv": "int8"}, (1.0, 0, 2.0, 0.3)),
        (args_of, TO_E4M3, (1.0, 0, 2.0, 1.0)),
        # With xqa, scores have 1 / sqrt(head_dim), and kv_scale if the cache is quantised.
        (xqa_args_of, {}, (ROOT, 0, 1.0, 1.0)),
        (xqa_args_of, {"kv": "int8"}, (ROOT, 1, 2.0, 1.0)),
        (xqa_args_of, {"kv": "nvfp4"}, (ROOT, 1, 2.0, 1.0)),
        (xqa_args_of, TO_E4M3, (ROOT, 1, 2.0, 4.0)),
    ],
)
def test_factors(
    entry: Any, changes: dict[str, Any], factors: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gets the factors of the entry point."""
    o_scale = 0.3 if entry is args_of else 1.0
    case = GqaCase(seq_lens=(70,), o_scale=o_scale, **changes)
    inputs = entry(case, monkeypatch, bmm2_scale=2.0)

    _, _, launches = launches_of(inputs, monkeypatch)

    names = ("score_factor", "bmm2_scales_scores", "bmm2_scale", "output_factor")
    assert tuple(launches[0].values[name] for name in names) == pytest.approx(factors)
