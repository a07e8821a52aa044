"""Outcomes of calls; tests/gpu/test_bench.py has the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import mlagen
from cache_tools.benchmark.calls import Call, mlagen_call
from cache_tools.benchmark.gpu import outcomes_of, smi_facts
from cache_tools.benchmark.inputs import Inputs, make_inputs
from cache_tools.benchmark.outcomes import Outcome
from cache_tools.benchmark.reference import attend
from cache_tools.benchmark.selection import case_of
from tests.fixture_types import Patch


@pytest.fixture
def inputs() -> Inputs:
    """Return three small input sets, before any measurement."""
    Times.taken.clear()
    return make_inputs(case_of("mla", batch=1, seq_len=20, heads=4), 3, "cpu")


class Times:
    """Times that encode the number of sets and the number of measurements before."""

    taken: ClassVar[list[str]] = []

    def __init__(self, _call: Call, sets: int) -> None:
        self.sets = sets

    def median_us(self, mode: str) -> float:
        """Return another time for every measurement."""
        self.taken.append(mode)
        return 100.0 * len(self.taken) + self.sets


def measure(inputs: Inputs, **makes: Callable[[Inputs], Call]) -> dict[str, Outcome]:
    """Return the outcomes of the libraries."""
    return outcomes_of(makes, inputs, attend(inputs), "model", Times)


def test_libraries_are_timed_by_turns(inputs: Inputs) -> None:
    """Each is timed twice, the second time in reverse, and the mean of both is its time."""
    outcomes = measure(inputs, a=mlagen_call, b=mlagen_call)
    assert [outcome.us for outcome in outcomes.values()] == [253.0, 253.0]
    assert Times.taken == ["model"] * 4
    for outcome in outcomes.values():
        assert outcome.error is not None
        assert 0 < outcome.error < inputs.case.error_bound


def test_nan_is_a_problem(inputs: Inputs) -> None:
    """A kernel that returns NaN is not timed."""
    inputs.keys[0].data.fill_(torch.nan)
    problem = "result: expected finite numbers, got NaN or infinity"
    assert measure(inputs, mlagen=mlagen_call) == {"mlagen": Outcome(problem=problem)}
    assert Times.taken == []


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (mlagen.UnsupportedError("no MLA decode kernel"), "no MLA decode kernel"),
        (AssertionError("head_dim\nand more"), "AssertionError: head_dim"),
        (RuntimeError("x" * 500), f"RuntimeError: {'x' * 160}"),
    ],
    ids=["of mlagen", "of several lines", "long"],
)
def test_an_error_is_reported_on_one_line(error: Exception, problem: str, inputs: Inputs) -> None:
    """An exception of a library is the problem of its case only, and stops no other."""

    def reject(_inputs: Inputs) -> Call:
        raise error

    outcomes = measure(inputs, a=reject, b=mlagen_call)

    assert outcomes["a"] == Outcome(problem=problem)
    assert outcomes["b"].us == 153.0


def test_a_failure_while_timed_has_no_time(inputs: Inputs, monkeypatch: Patch) -> None:
    """A call that fails in its second measurement has no result."""
    median_us = Times.median_us

    def fail_late(self: Times, mode: str) -> float:
        if len(Times.taken) == 1:
            raise RuntimeError("captured")
        return median_us(self, mode)

    monkeypatch.setattr(Times, "median_us", fail_late)

    assert measure(inputs, a=mlagen_call)["a"] == Outcome(problem="RuntimeError: captured")


FACTS = ("driver", "power_limit_w", "max_sm_mhz", "max_memory_mhz")


@pytest.mark.parametrize(
    ("printed", "facts"),
    [(None, (None,) * 4), ("580.1, 700.00, 1980, [N/A]", ("580.1", 700.0, 1980.0, None))],
)
def test_facts_are_those_of_nvidia_smi(
    printed: str | None, facts: tuple[object, ...], monkeypatch: Any, tmp_path: Path
) -> None:
    """The driver is text, limits are numbers; what it does not report, or without it, is None."""
    if printed is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{printed}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: object())
    assert smi_facts(0) == dict(zip(FACTS, facts, strict=True))
