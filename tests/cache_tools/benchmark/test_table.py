"""Table of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cache_tools.benchmark.cases import Case
from cache_tools.benchmark.comparison import Change
from cache_tools.benchmark.outcomes import Outcome
from cache_tools.benchmark.run import run_cases
from cache_tools.benchmark.selection import case_of
from cache_tools.benchmark.table import all_right, print_changes, print_results, problems_of
from mlagen import __version__
from tests.fake_machine import FAILED, RIGHT, WRONG, FakeMachine


def document(mlagen: Outcome, fa3: Callable[[Case], Outcome] | None = None) -> dict[str, Any]:
    """Return the document of one case."""
    machine = FakeMachine(lambda _: mlagen, fa3)
    return run_cases([case_of("mla")], machine, lambda _: None)


def printed(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return header, table and, if there is one, summary."""
    print_results(document)
    return capsys.readouterr().out.removesuffix("\n").split("\n\n")


def rows(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Return the cells of the table."""
    table = printed(document, capsys)[1].splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table]


def test_what_is_unknown_is_left_out_of_the_header(capsys: pytest.CaptureFixture[str]) -> None:
    """A missing driver, power cap, clock, compiler and commit leave no gap."""
    unknown = dict.fromkeys(("driver", "power_limit_w", "max_sm_mhz", "nvrtc", "commit"))

    assert printed(document(RIGHT) | unknown, capsys)[0].splitlines()[:2] == [
        "GPU       NVIDIA H200",
        f"mlagen    {__version__}, torch 2.11.0",
    ]


def test_each_mode_with_ratios_has_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """It counts the cases in which mlagen is faster, as fast and slower, and has the mean ratio."""
    times = iter([1009.0, 500.0, 2000.0, 4000.0])
    machine = FakeMachine(fa3=lambda _: Outcome(us=next(times), error=1e-3))
    cases = [case_of("mla"), case_of("gqa")]

    found = run_cases(cases, machine, lambda _: None, ["fresh", "model"])

    fresh, model = printed(found, capsys)[2].splitlines()
    assert fresh == (
        "fresh: of 2 cases with a baseline, faster than the best in 0, within 1% in 1, "
        "slower in 1; geometric mean of the ratios 0.71, least 0.50"
    )
    assert model == (
        "model: of 2 cases with a baseline, faster than the best in 2, within 1% in 0, "
        "slower in 0; geometric mean of the ratios 2.83, least 2.00"
    )
    assert len(printed(document(RIGHT), capsys)) == 2


def test_wrong_and_missing_results_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong result is marked, and a missing one has no numbers."""
    wrong = rows(document(WRONG, lambda _: FAILED), capsys)[1]
    missing = rows(document(FAILED, lambda _: WRONG), capsys)[1]

    assert wrong[-1] == "5.0e-01 WRONG"
    assert missing == ["mla bf16, 128 x 4096, 128 heads", "182.5", "failed"]


def test_changes_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A row has both times and a verdict."""
    print_changes(
        [
            Change(case="a", mode="fresh", before_us=100.0, us=104.0),
            Change(case="b", mode="fresh", before_us=100.0, us=None),
        ],
        0.03,
    )

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["case", "mode", "before_us", "us", "change", "verdict"],
        ["a", "fresh", "100.0", "104.0", "+4.0%", "slower"],
        ["b", "fresh", "100.0", "missing", "missing"],
    ]


def test_problems_are_lines_with_their_case() -> None:
    """Each library has its own lines, and none if all is right."""
    label = "mla bf16, 128 x 4096, 128 heads"

    assert list(problems_of(document(RIGHT, lambda _: RIGHT))) == []
    assert list(problems_of(document(WRONG, lambda _: FAILED))) == [
        f"mlagen: {label}: relative error: expected 0.006 or less, got 5.0e-01",
        f"fa3: {label}: RuntimeError: no memory",
    ]


@pytest.mark.parametrize(
    ("mlagen", "fa3", "expected"),
    [
        ([RIGHT, RIGHT], FAILED, True),
        ([RIGHT, WRONG], RIGHT, False),
        ([FAILED, RIGHT], RIGHT, False),
    ],
    ids=["the baseline failed", "one wrong", "one failed"],
)
def test_only_mlagen_can_fail_the_command(
    mlagen: list[Outcome], fa3: Outcome, expected: bool
) -> None:
    """One wrong case fails the benchmark; an error of a baseline does not."""
    outcomes = iter(mlagen)
    machine = FakeMachine(lambda _: next(outcomes), lambda _: fa3)

    found = run_cases([case_of("mla"), case_of("gqa")], machine, lambda _: None)

    assert all_right(found) is expected
