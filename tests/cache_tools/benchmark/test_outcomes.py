"""JSON document of a benchmark."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cache_tools.benchmark.outcomes import FIELDS, Measured, Outcome, document_of
from cache_tools.benchmark.roofline import Ceilings
from cache_tools.benchmark.selection import case_of
from tests.fake_machine import FAILED, RIGHT, WRONG, FakeMachine

CEILINGS = Ceilings(read_gb_s=4000.0, bf16_tflop_s=800.0)


def document(mlagen: Outcome = RIGHT, **baselines: Outcome) -> dict[str, Any]:
    """Return the document of the default MLA case."""
    measured = Measured(
        case=case_of("mla"), mode="fresh", input_sets=3, mlagen=mlagen, baselines=baselines
    )
    facts = FakeMachine().facts()
    written = json.dumps(document_of(facts, CEILINGS, [measured]), allow_nan=False)
    parsed: dict[str, Any] = json.loads(written)
    return parsed


def test_the_document_has_the_documented_names() -> None:
    """The names are exactly those of the reference, in order."""
    found = document(fa3=RIGHT)
    (case,) = found["cases"]
    objects = (found, found["ceilings"], case, case["mlagen"])

    assert [list(each) for each in objects] == [list(names) for names in FIELDS.values()]
    assert list(case["baselines"]["fa3"]) == list(case["mlagen"])


def test_rates_are_work_over_time() -> None:
    """146 GFLOP and 640 MB in a millisecond are 5.5 times the roofline bound."""
    (case,) = document()["cases"]

    assert case["roofline_us"] == pytest.approx(182.536, rel=1e-5)
    assert case["mlagen"] == {
        "us": 1000.0,
        "tflop_s": pytest.approx(146.028888),
        "gb_s": pytest.approx(639.63136),
        "roofline_share": pytest.approx(0.182536, rel=1e-5),
        "error": 1.7e-3,
        "is_right": True,
        "problem": None,
    }
    assert (case["input_sets"], case["baselines"], case["ratio"]) == (3, {}, None)


HALF, LATE = Outcome(us=500.0, error=1e-3), Outcome(us=2000.0, error=1e-3)


@pytest.mark.parametrize(
    ("mlagen", "baselines", "best", "ratio"),
    [
        (RIGHT, {"a": LATE, "b": HALF}, "b", 0.5),
        (RIGHT, {"a": LATE, "b": WRONG, "c": FAILED}, "a", 2.0),
        (WRONG, {"a": LATE}, "a", None),
        (FAILED, {"a": LATE}, "a", None),
        (RIGHT, {"a": WRONG}, None, None),
    ],
)
def test_only_right_results_are_compared(
    mlagen: Outcome, baselines: dict[str, Outcome], best: str | None, ratio: float | None
) -> None:
    """A wrong or missing result has no ratio, and is not the best baseline."""
    (case,) = document(mlagen, **baselines)["cases"]

    assert (case["best_baseline"], case["ratio"]) == (best, ratio)


def test_a_failure_has_a_problem_and_no_numbers() -> None:
    """A failed measurement is null."""
    (case,) = document(FAILED)["cases"]

    assert case["mlagen"] == {
        **dict.fromkeys(("us", "tflop_s", "gb_s", "roofline_share", "error")),
        "is_right": False,
        "problem": "RuntimeError: no memory",
    }


@pytest.mark.parametrize(("error", "is_right"), [(6e-3, True), (6.1e-3, False)])
def test_the_bound_decides(error: float, is_right: bool) -> None:
    """An error is right up to the bound of its case."""
    (case,) = document(Outcome(us=1.0, error=error))["cases"]

    assert case["mlagen"]["is_right"] is is_right
