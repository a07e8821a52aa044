"""The runner of FlashInfer's own tests, on a small checkout with CPU tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.flashinfer.run import (
    ROOT,
    SELECTIONS,
    Difference,
    Outcome,
    classified,
    counted,
    read_differences,
    stale_differences,
)

# A test of each kind, as FlashInfer's tests are written.
TESTS = """
import flashinfer
import torch
from flashinfer.jit.attention import gen_batch_mla_module
from flashinfer.utils import get_compute_capability

from tests.test_helpers.answer import ANSWER


def run(page_size):
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(1, device="cuda"))
    ints = [torch.tensor(x, dtype=torch.int32).to(0) for x in ([0, 1], [0, 1], [0], [5])]
    types = (torch.bfloat16, torch.bfloat16)
    wrapper.plan(*ints, 2, 512, 64, page_size, True, 1.0, *types)
    parts = [(1, 2, 512), (1, 2, 64), (1, 8, 512), (1, 8, 64)]
    return wrapper.run(*(torch.zeros(part, dtype=types[0], device="cuda") for part in parts))


def test_that_passes():
    assert run(8).shape == (1, 2, 512)
    assert (get_compute_capability(torch.device("cuda")), ANSWER) == ((9, 0), 42)


def test_that_fails():
    run(16)


def test_of_something_else():
    gen_batch_mla_module("fa2")
"""


def test_the_runner_counts_each_kind(tmp_path: Path) -> None:
    """Tests of a checkout see mlagen as FlashInfer, and one that fails is the runner's status."""
    for folder in ("tests", "tests/attention", "tests/test_helpers"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "tests/test_helpers/answer.py").write_text("ANSWER = 42\n", encoding="utf-8")
    (tmp_path / "tests/attention/test_deepseek_mla.py").write_text(TESTS, encoding="utf-8")
    runner = [sys.executable, "-m", "tests.flashinfer.run", str(tmp_path), "test_deepseek_mla.py"]

    done = subprocess.run(
        [*runner, "--cpu", "--verbose"], cwd=ROOT, check=False, capture_output=True, text=True
    )

    assert done.returncode == 1
    first, _, *others = done.stdout.splitlines()
    assert first == "test_deepseek_mla.py as 9.0: 1 failed, 1 left out, 1 passed"
    assert others[0].startswith("failed\ttest_deepseek_mla.py::test_that_fails")
    assert others[-1] == "in all: 1 failed, 1 left out, 1 passed"


def test_failures_that_the_list_has_are_intended() -> None:
    """A failure that a pattern matches is intended, any other is a failure, and skips are told."""
    rows = [Difference("test_a.py::test_one[[]*", "because"), Difference("test_b.py::*", "so")]
    entries = [
        {"id": f"tests/attention/{test}", "outcome": outcome, "reason": reason}
        for test, outcome, reason in (
            ("test_a.py::test_one[1]", "failed", "E"),
            ("test_a.py::test_one_more[1]", "failed", "E"),
            ("test_b.py::test_two", "passed", ""),
            ("test_c.py::test_three", "skipped", "Skipped: x: no part of mlagen"),
            ("test_c.py::test_four", "skipped", "Skipped: needs another GPU"),
        )
    ]

    outcomes = classified(entries, rows)

    kinds = ["intended", "failed", "passed", "left out", "skipped"]
    assert [outcome.kind for outcome in outcomes] == kinds
    assert outcomes[0].reason == "because"
    assert counted(outcomes) == "1 failed, 1 intended, 1 left out, 1 passed, 1 skipped"
    assert stale_differences(outcomes, rows) == rows[1:]
    assert stale_differences([Outcome("test_b.py::test_two", "skipped", "")], rows) == []


@pytest.mark.parametrize("difference", read_differences(), ids=lambda row: row.pattern)
def test_the_page_of_differences_names_each_row(difference: Difference) -> None:
    """Each intended difference is of a file that is run, and its reason stands on the page."""
    page = (ROOT / "docs/reference/flashinfer-differences.md").read_text(encoding="utf-8")

    assert difference.pattern.partition("::")[0] in {row.file for row in SELECTIONS}
    assert difference.reason in page
