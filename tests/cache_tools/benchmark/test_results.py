"""Steps, document, table and plot of a benchmark, and earlier results beside it."""

from __future__ import annotations

import json
import re
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
from cache_tools.benchmark.outcomes import Outcome, Step, run_cases
from cache_tools.benchmark.plot import draw, write_plot
from cache_tools.benchmark.selection import case_of
from cache_tools.benchmark.table import print_changes, print_results, problems_of
from tests.cli_documents import DOCUMENTS, require_document
from tests.fake_machine import FAILED, RIGHT, WRONG, FakeMachine, results

CASES = [case_of("mla"), case_of("gqa")]


def document(
    mlagen: Callable[[Case], Outcome] = lambda _: RIGHT, modes: tuple[str, ...] = ("fresh",)
) -> dict[str, Any]:
    """Return the results of two cases."""
    return run_cases(CASES, FakeMachine(mlagen), lambda _: None, modes)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"cases": 3}', "\xff", "[" * 200_000, "9" * 5000], ids=repr
)
def test_another_file_is_rejected(text: str, tmp_path: Path) -> None:
    """The message has the option and the file; a folder is no file."""
    path = tmp_path / "results.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(mlagen.ArgumentError) as caught:
        read_document("from-json", path)
    assert str(caught.value) == (f"from-json: expected results of mlagen bench --json, got {path}")
    with pytest.raises(mlagen.ArgumentError, match="baseline: expected a file of mlagen bench"):
        read_document("baseline", tmp_path)


NESTED: list[Any] = []
for _ in range(500):
    NESTED = [NESTED]
NO_NUMBER = "expected a finite number"
OF_NO_PROBLEM = "expected a number of a result without a problem, got None"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("gpu", {}, "expected a text, got dict"),
        ("power_limit_w", "700", f"{NO_NUMBER} or null, got '700'"),
        ("max_sm_mhz", True, f"{NO_NUMBER} or null, got True"),
        ("ceilings", None, "expected fields read_gb_s to fp8_tflop_s, got None"),
        ("ceilings.read_gb_s", float("inf"), f"{NO_NUMBER}, got inf"),
        ("baselines", 5, "expected a map, got 5"),
        ("baselines.fa3", NESTED, "expected a text, got [["),
        ("cases", {}, "expected a list, got dict"),
        ("cases.0", {}, "expected fields case to ratio, got dict"),
        ("cases.0.case", ["a"], "expected a text, got ['a']"),
        ("cases.0.batch", 1.5, "expected an integer, got 1.5"),
        ("cases.0.roofline_us", "x", f"{NO_NUMBER}, got 'x'"),
        ("cases.0.ratio", 0.0, "expected more than 0, got 0.0"),
        ("cases.0.best_baseline", "fa2", "expected one of `baselines`, got 'fa2'"),
        ("cases.0.mlagen", [1], "expected fields us to problem, got [1]"),
        ("cases.0.mlagen.us", None, OF_NO_PROBLEM),
        ("cases.0.mlagen.us", 0, "expected more than 0, got 0"),
        ("cases.0.mlagen.us", float("nan"), f"{NO_NUMBER} or null, got nan"),
        ("cases.0.mlagen.us", 10**400, f"{NO_NUMBER} or null, got an int of 1329 bits"),
        ("cases.0.mlagen.is_right", 1, "expected a boolean, got 1"),
        ("cases.0.baselines", [1], "expected a map, got [1]"),
        ("cases.0.baselines.fa3.us", -1.0, "expected more than 0, got -1.0"),
        ("cases.0.baselines.fa3.error", None, OF_NO_PROBLEM),
    ],
)
def test_a_value_that_no_benchmark_has_is_rejected(
    place: str, value: object, message: str, tmp_path: Path
) -> None:
    """The message has the option, the file, the place in it and the rule."""
    found = results(fa3=RIGHT)
    *outer, last = [int(name) if name.isdecimal() else name for name in place.split(".")]
    inner: Any = found
    for name in outer:
        inner = inner[name]
    inner[last] = value
    path = tmp_path / "results.json"
    path.write_text(json.dumps(found))

    with pytest.raises(mlagen.ArgumentError) as caught:
        read_document("baseline", path)
    shown = re.sub(r"(?<=cases)\.0|(?<=baselines)\.fa3", lambda name: f"[{name[0][1:]}]", place)
    assert str(caught.value).startswith(f"baseline: {path}.{shown}: {message}")


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


MLA, GQA = (case.label for case in CASES)
HALF, LATE = Outcome(us=500.0, error=1e-3), Outcome(us=2000.0, error=1e-3)


def test_every_part_begins_and_ends() -> None:
    """Ceilings come first, with the FP8 rate of FP8 queries; steps begin each part, and end it."""
    for dtype, ceilings in (("bf16", "ceilings"), ("e4m3", "ceilings with fp8")):
        machine = FakeMachine()
        run_cases([case_of("mla", dtype=dtype, kv_dtype="e4m3")], machine, lambda _: None)
        assert machine.calls[0] == ceilings
    steps: list[Step] = []
    run_cases(CASES[:1], FakeMachine(), steps.append)
    line = "read 4000 GB/s, GEMM bf16 800 TFLOP/s"
    assert steps == [
        Step(name="ceilings", done=0, total=2),
        Step(name="ceilings", done=1, total=2, line=line),
        Step(name=MLA, done=1, total=2),
        Step(name=MLA, done=2, total=2, line=f"   1000.0 us  {MLA}"),
    ]


def test_every_case_runs_in_every_mode_and_a_line_marks_a_failure() -> None:
    """A case is made once; rows come by modes; a wrong or missing result looks like no time."""
    outcomes, lines = iter([RIGHT, WRONG, FAILED, RIGHT]), list[str | None]()
    machine = FakeMachine(lambda _: next(outcomes))
    rows = [f"{label}, {mode}" for mode in ("model", "fresh") for label in (MLA, GQA)]
    names = [f"{label}, {mode}" for label in (MLA, GQA) for mode in ("model", "fresh")]

    found = run_cases(CASES, machine, lambda step: lines.append(step.line), ["model", "fresh"])

    times = ["   1000.0 us", "      1.0 us, WRONG", "      failed", "   1000.0 us"]
    assert machine.calls[1:] == names
    assert [f"{row['case']}, {row['mode']}" for row in found["cases"]] == rows
    assert [line for line in lines if line][1:] == [
        f"{time}  {name}" for time, name in zip(times, names, strict=True)
    ]


def test_the_document_has_the_documented_names() -> None:
    """The names are exactly those of the reference, in order."""
    require_document(results(fa3=RIGHT), DOCUMENTS["bench"])


NUMBERS = ("us", "tflop_s", "gb_s", "roofline_share", "error")


@pytest.mark.parametrize(
    ("outcome", "numbers", "is_right"),
    [  # 146 GFLOP and 640 MB
        (RIGHT, (1000.0, 146.028888, 639.63136, 0.182536, 1.7e-3), True),
        (Outcome(us=1e6, error=6e-3), (1e6, 0.146028888, 0.63963136, 0.000182536, 6e-3), True),
        (Outcome(us=1e6, error=6.1e-3), (1e6, 0.146028888, 0.63963136, 0.000182536, 6.1e-3), False),
        (FAILED, (None,) * 5, False),
    ],
    ids=["rates", "at the bound", "above the bound", "failed"],
)
def test_an_outcome_has_rates_or_a_problem(
    outcome: Outcome, numbers: tuple[float | None, ...], is_right: bool
) -> None:
    """Rates are work over time, an error is right up to its bound, and a failure has no numbers."""
    (case,) = results(outcome)["cases"]
    found = case["mlagen"]
    assert [found[name] for name in NUMBERS] == [n and pytest.approx(n, rel=1e-5) for n in numbers]
    assert (found["is_right"], found["problem"]) == (is_right, outcome.problem)
    assert case["roofline_us"] == pytest.approx(182.536, rel=1e-5)
    assert (case["baselines"], case["ratio"]) == ({}, None)


@pytest.mark.parametrize(
    ("outcome", "baselines", "best", "ratio"),
    [
        (RIGHT, {"a": LATE, "b": HALF}, "b", 0.5),
        (RIGHT, {"a": LATE, "b": WRONG, "c": FAILED}, "a", 2.0),
        (WRONG, {"a": LATE}, "a", None),
        (FAILED, {"a": LATE}, "a", None),
        (RIGHT, {"a": WRONG}, None, None),
    ],
)
def test_only_right_results_are_compared(
    outcome: Outcome, baselines: dict[str, Outcome], best: str | None, ratio: float | None
) -> None:
    """A wrong or missing result has no ratio, and is not the best baseline."""
    (case,) = results(outcome, **baselines)["cases"]
    assert (case["best_baseline"], case["ratio"]) == (best, ratio)


def printed(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return header, table and, if there is one, summary."""
    print_results(document)
    return capsys.readouterr().out.removesuffix("\n").split("\n\n")


def test_each_mode_with_ratios_has_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """It counts cases, and has the mean ratio; what is unknown is left out of the header."""
    times = iter([1009.0, 2000.0, 500.0, 4000.0])
    machine = FakeMachine(fa3=lambda _: Outcome(us=next(times), error=1e-3))

    found = run_cases(CASES, machine, lambda _: None, ["fresh", "model"])
    unknown = dict.fromkeys(("driver", "power_limit_w", "max_sm_mhz", "nvrtc", "commit"))
    header, _, summary = printed(found | unknown, capsys)

    lines = [" ".join(line.split()) for line in header.splitlines()[:2]]
    assert lines == ["GPU NVIDIA H200", f"mlagen {mlagen.__version__}, torch 2.11.0"]
    begin = "of 2 cases with a baseline, faster than the best in"
    mean = "geometric mean of the ratios"
    assert summary.splitlines() == [
        f"fresh: {begin} 0, within 1% in 1, slower in 1; {mean} 0.71, least 0.50",
        f"model: {begin} 2, within 1% in 0, slower in 0; {mean} 2.83, least 2.00",
    ]


LARGE, NO_MEMORY = "relative error: expected 0.006 or less, got 5.0e-01", "RuntimeError: no memory"


@pytest.mark.parametrize(
    ("outcome", "fa3", "end", "problems"),
    [
        (RIGHT, RIGHT, "1.00", {}),
        (WRONG, FAILED, "5.0e-01 WRONG", {"mlagen": LARGE, "fa3": NO_MEMORY}),
        (FAILED, FAILED, "182.5 failed", {"mlagen": NO_MEMORY, "fa3": NO_MEMORY}),
    ],
    ids=["right", "wrong", "failed"],
)
def test_wrong_and_missing_results_are_marked_and_named(
    outcome: Outcome, fa3: Outcome, end: str, problems: dict[str, str], capsys: Any
) -> None:
    """A wrong result is marked, a missing one has no numbers, and each has a line of its own."""
    found = results(outcome, fa3=fa3)
    row = " ".join(printed(found, capsys)[1].splitlines()[1].split())
    assert row.endswith(f" {end}")
    assert list(problems_of(found)) == [f"{name}: {MLA}: {problems[name]}" for name in problems]


def test_every_right_result_is_a_labeled_bar(tmp_path: Path) -> None:
    """Bars have shares of the bound and ratios; the SVG files of equal results are equal."""
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra `bench`")
    from matplotlib.patches import Rectangle

    cases = [case_of("mla"), case_of("mla", heads=16), case_of("mla", dtype="e4m3")]
    ours = dict(zip(cases, (RIGHT, WRONG, RIGHT), strict=True))
    theirs = dict(zip(cases, (Outcome(us=1500.0, error=1e-3), RIGHT, FAILED), strict=True))
    machine = FakeMachine(ours.__getitem__, theirs.__getitem__)
    found = run_cases(cases, machine, lambda _: None)
    found["cases"][2]["case"] = r"a name with $\frac$"
    png, *svg = (tmp_path / name for name in ("bars.png", "one.svg", "other.svg"))
    for path in (png, *svg):
        write_plot(found, path)
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert png.stat().st_size > 10_000
    assert svg[0].read_bytes() == svg[1].read_bytes()
    assert ">mla bf16, 128 x 4096, 16 heads</text>" in svg[0].read_text()
    assert r">a name with $\frac$</text>" in svg[0].read_text()
    (axes,) = draw(found).axes
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    texts = ["0.18, 1.50x", "0.12, fa3", "0.15, fa3", "0.09"]
    legend = ["mlagen, and its speed over the baseline", "best baseline"]
    assert [round(float(bar.get_width()), 2) for bar in bars] == [0.18, 0.12, 0.15, 0.09]
    assert [text.get_text() for text in axes.texts] == texts
    assert axes.get_legend_handles_labels()[1] == legend
