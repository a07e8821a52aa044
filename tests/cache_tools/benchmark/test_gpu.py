"""Outcomes of calls; tests/gpu/test_bench.py has the tests that need a GPU."""

from __future__ import annotations

import pytest
import torch

import mlagen
from cache_tools.benchmark.calls import Call, mlagen_call
from cache_tools.benchmark.gpu import outcome_of
from cache_tools.benchmark.inputs import Inputs, make_inputs
from cache_tools.benchmark.outcomes import Outcome
from cache_tools.benchmark.reference import attend
from cache_tools.benchmark.selection import case_of


@pytest.fixture
def inputs() -> Inputs:
    """Return three small input sets."""
    return make_inputs(case_of("mla", batch=1, seq_len=20, heads=4), 3, "cpu")


def timed(_call: Call, sets: int) -> float:
    """Return a time that encodes the number of sets."""
    return 100.0 + sets


def test_a_result_is_compared_and_timed(inputs: Inputs) -> None:
    """The error is that of the first call, the time that of calls with all sets."""
    outcome = outcome_of(mlagen_call, inputs, attend(inputs), timed)

    assert outcome.us == 103.0
    assert outcome.error is not None
    assert 0 < outcome.error < inputs.case.error_bound


def test_nan_is_a_problem(inputs: Inputs) -> None:
    """A kernel that returns NaN is not timed."""
    inputs.keys[0].fill_(torch.nan)

    outcome = outcome_of(mlagen_call, inputs, attend(inputs), timed)

    assert outcome == Outcome(problem="result: expected finite numbers, got NaN or infinity")


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
    """An exception of a library is the problem of its case only."""

    def reject(_inputs: Inputs) -> Call:
        raise error

    assert outcome_of(reject, inputs, attend(inputs), timed) == Outcome(problem=problem)
