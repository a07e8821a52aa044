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
from cache_tools.benchmark.table import print_changes
from tests.fake_machine import RIGHT, WRONG, FakeMachine

CASES = [case_of("mla"), case_of("gqa")]


def document(
    mlagen: Callable[[Case], Outcome] = lambda _: RIGHT, modes: tuple[str, ...] = ("fresh",)
) -> dict[str, Any]:
    """Return the results of two cases."""
    return run_cases(CASES, FakeMachine(mlagen), lambda _: None, modes)


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
    assert [str(change) for change in changes] == [
        f"{label}, fresh: 1100.0 us, 1000.0 us before",
        f"{other}, fresh: no right result, 1000.0 us before",
    ]


def test_changes_beyond_the_tolerance_have_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """A row has both times; the tolerance is a percentage, and holds in both directions."""
    times = {102.9: "ok", 103.1: "slower", 97.1: "ok", 96.9: "faster", None: "missing"}
    changes = [Change(case="a", mode="fresh", before_us=100.0, us=us) for us in times]

    print_changes(changes, parse_tolerance("3%"))

    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == ["case", "mode", "before_us", "us", "change", "verdict"]
    assert [row[-1] for row in rows] == list(times.values())
    assert rows[1] == ["a", "fresh", "100.0", "103.1", "+3.1%", "slower"]
    assert rows[4] == ["a", "fresh", "100.0", "missing", "missing"]
    assert parse_tolerance("0%") == 0.0
    for text in ("3", "0.03", "-1%", "nan%", "inf%", "%"):
        with pytest.raises(mlagen.ArgumentError, match="tolerance: expected a percentage"):
            parse_tolerance(text)


def test_other_results_are_not_compared() -> None:
    """Times of two GPUs are not compared, and a comparison of nothing does not pass."""
    rule = "^baseline: expected results of NVIDIA H200, got those of NVIDIA H100"
    with pytest.raises(mlagen.ArgumentError, match=rule):
        changes_since({**document(), "gpu": "NVIDIA H100"}, document())
    with pytest.raises(mlagen.ArgumentError, match=r"^baseline: expected a case and mode in com"):
        changes_since(document(modes=("model",)), document())
