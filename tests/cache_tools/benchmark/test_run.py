"""Steps of a benchmark."""

from __future__ import annotations

from cache_tools.benchmark.run import Step, run_cases
from cache_tools.benchmark.selection import case_of
from tests.fake_machine import FAILED, WRONG, FakeMachine


def test_every_part_begins_and_ends() -> None:
    """Ceilings come first; each part has a step at its start, and one with a line at its end."""
    steps: list[Step] = []
    case = case_of("mla", batch=1)

    run_cases([case], FakeMachine(), steps.append)

    assert steps == [
        Step(name="ceilings", done=0, total=2),
        Step(
            name="ceilings",
            done=1,
            total=2,
            line="read 4000 GB/s, GEMM bf16 800 TFLOP/s",
        ),
        Step(name=case.label, done=1, total=2),
        Step(name=case.label, done=2, total=2, line=f"   1000.0 us  {case.label}"),
    ]


def test_a_line_marks_a_failure() -> None:
    """Neither a wrong nor a missing result looks like a time."""
    outcomes = iter([WRONG, FAILED])
    lines: list[str | None] = []
    cases = [case_of("mla", batch=1), case_of("mla", batch=2)]

    run_cases(cases, FakeMachine(lambda _: next(outcomes)), lambda step: lines.append(step.line))

    assert [line for line in lines if line][1:] == [
        f"      1.0 us, WRONG  {cases[0].label}",
        f"      failed  {cases[1].label}",
    ]


def test_every_case_runs_in_every_mode() -> None:
    """The modes come one after another, each with all cases, and lines name them."""
    machine, lines = FakeMachine(), list[str | None]()
    cases = [case_of("mla", batch=1), case_of("gqa", batch=1)]
    names = [f"{case.label}, {mode}" for mode in ("model", "fresh") for case in cases]

    document = run_cases(cases, machine, lambda step: lines.append(step.line), ["model", "fresh"])

    assert machine.calls[1:] == names
    assert [f"{row['case']}, {row['mode']}" for row in document["cases"]] == names
    assert [line for line in lines if line][1:] == [f"   1000.0 us  {name}" for name in names]


def test_the_fp8_rate_is_measured_on_demand() -> None:
    """An FP8 KV cache alone does not need it."""
    without, needing = FakeMachine(), FakeMachine()

    run_cases([case_of("mla", kv_dtype="e4m3")], without, lambda _: None)
    run_cases([case_of("mla"), case_of("mla", dtype="e4m3")], needing, lambda _: None)

    assert without.calls[0] == "ceilings"
    assert needing.calls[0] == "ceilings with fp8"
