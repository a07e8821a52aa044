"""Earlier results of a benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mlagen
from cache_tools.benchmark.cases import Case
from cache_tools.benchmark.comparison import (
    Change,
    changes_since,
    choose_rows,
    parse_tolerance,
    read_document,
)
from cache_tools.benchmark.outcomes import Outcome
from cache_tools.benchmark.run import run_cases
from cache_tools.benchmark.selection import case_of
from tests.fake_machine import RIGHT, WRONG, FakeMachine

CASES = [case_of("mla"), case_of("gqa")]


def document(
    mlagen: Callable[[Case], Outcome] = lambda _: RIGHT, modes: tuple[str, ...] = ("fresh",)
) -> dict[str, Any]:
    """Return the results of two cases."""
    return run_cases(CASES, FakeMachine(mlagen), lambda _: None, modes)


def test_what_the_command_wrote_is_read(tmp_path: Path) -> None:
    """A document survives a file."""
    path = tmp_path / "results.json"
    path.write_text(json.dumps(document()))

    assert read_document("baseline", path) == document()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"cases": 3}', "\xff", json.dumps({**document(), "cases": [{}]})]
)
def test_another_file_is_rejected(text: str, tmp_path: Path) -> None:
    """The message has the option and the file; a folder is no file."""
    path = tmp_path / "results.json"
    path.write_text(text, encoding="latin-1")

    with pytest.raises(mlagen.ArgumentError) as caught:
        read_document("from_json", path)

    assert str(caught.value) == (f"from_json: expected results of mlagen bench --json in {path}")
    with pytest.raises(mlagen.ArgumentError, match="baseline: expected a file of mlagen bench"):
        read_document("baseline", tmp_path)


def test_rows_are_chosen_by_case_and_mode() -> None:
    """None chooses all, and no row at all is rejected."""
    found = document(modes=("fresh", "model"))

    assert choose_rows(found, None, None) == found
    (row,) = choose_rows(found, CASES[1:], ["model"])["cases"]
    assert (row["family"], row["mode"]) == ("gqa", "model")
    with pytest.raises(mlagen.ArgumentError, match="expected results of the chosen cases"):
        choose_rows(found, None, ["sustained"])


def test_a_time_is_compared_with_the_earlier_one() -> None:
    """Cases are matched by name and mode; a wrong result now has no time."""
    earlier = document(modes=("fresh", "model"))
    now = document(lambda case: WRONG if case.family == "gqa" else Outcome(us=1100.0, error=1e-3))

    changes = changes_since(earlier, now)

    label, other = (case.label for case in CASES)
    assert changes == [
        Change(case=label, mode="fresh", before_us=1000.0, us=1100.0),
        Change(case=other, mode="fresh", before_us=1000.0, us=None),
    ]
    assert [str(change) for change in changes] == [
        f"{label}, fresh: 1100.0 us, 1000.0 us before",
        f"{other}, fresh: no right result, 1000.0 us before",
    ]


@pytest.mark.parametrize(
    ("us", "verdict"),
    [(102.9, "ok"), (103.1, "slower"), (97.1, "ok"), (96.9, "faster"), (None, "missing")],
)
def test_a_change_within_the_tolerance_is_ok(us: float | None, verdict: str) -> None:
    """The tolerance holds in both directions."""
    assert Change(case="a", mode="fresh", before_us=100.0, us=us).verdict(0.03) == verdict


@pytest.mark.parametrize(
    ("earlier", "message"),
    [
        (
            {**document(), "gpu": "NVIDIA H100"},
            "baseline: expected results of NVIDIA H200, got those of NVIDIA H100",
        ),
        (document(modes=("model",)), "baseline: expected a case and mode in common"),
    ],
    ids=["another GPU", "no case in common"],
)
def test_other_results_are_not_compared(earlier: dict[str, Any], message: str) -> None:
    """Times of two GPUs are not compared, and a comparison of nothing does not pass."""
    with pytest.raises(mlagen.ArgumentError, match=f"^{message}"):
        changes_since(earlier, document())


def test_a_tolerance_is_a_percentage() -> None:
    """A fraction without % would be ambiguous."""
    assert parse_tolerance("3%") == 0.03
    assert parse_tolerance("0%") == 0.0
    for text in ("3", "0.03", "-1%", "nan%", "inf%", "%"):
        with pytest.raises(mlagen.ArgumentError, match="tolerance: expected a percentage"):
            parse_tolerance(text)
