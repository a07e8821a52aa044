"""The runner of FlashInfer's own tests, on a small checkout with CPU tensors."""

from __future__ import annotations

import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.flashinfer import run as flashinfer_run
from tests.flashinfer.outcomes import (
    Difference,
    Outcome,
    added,
    classified,
    read_differences,
    summary_of,
    told,
)
from tests.flashinfer.run import ROOT
from tests.flashinfer.selections import SELECTIONS
from tests.programs import run_program

# A test of each kind, as FlashInfer's tests are written.
TESTS = """
import cutlass
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
    gen_batch_mla_module(cutlass.Float32)


def test_that_finds_the_gpu_full():
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def test_that_cannot_make_a_context():
    raise RuntimeError("CUDA error: out of memory")


def test_that_finds_the_gpu_full_as_it_compares():
    raise RuntimeError("Comparing") from RuntimeError("CUDA out of memory.")
"""
# FlashInfer's tests of batch decode compare with a function that is a reference here.
WRAPPER = """
import flashinfer
import torch


def test_batch_decode():
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, device="cuda"))
    given = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0], [5])]
    sizes = (4, 2, 64, 8)
    wrapper.plan(*given, *sizes, q_data_type=torch.float16)
    query = torch.randn(1, 4, 64, dtype=torch.float16, device="cuda")
    keys, values = torch.randn(2, 1, 8, 2, 64, dtype=torch.float16, device="cuda")
    out = wrapper.run_return_lse(query, (keys, values))[0]
    wanted = flashinfer.single_decode_with_kv_cache(query[0], keys[0, :5], values[0, :5])
    torch.testing.assert_close(out[0], wanted, rtol=1e-3, atol=1e-3)
"""


def run(checkout: Path, *options: str, **files: str) -> tuple[int, list[str]]:
    """Run tests of a small checkout on the CPU; return the status and the lines of the output."""
    for folder in ("tests", "tests/attention", "tests/test_helpers"):
        (checkout / folder).mkdir(exist_ok=True)
        (checkout / folder / "__init__.py").touch()
    (checkout / "tests/test_helpers/answer.py").write_text("ANSWER = 42\n", encoding="utf-8")
    for name, text in files.items():
        (checkout / f"tests/attention/{name}.py").write_text(text, encoding="utf-8")
    names = [f"{name}.py" for name in files]
    forked = SimpleNamespace(run=run_program, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as output:
        patch.setattr(sys, "argv", ["run", str(checkout), *names, "--cpu", *options])
        patch.setattr(flashinfer_run, "subprocess", forked)
        status = flashinfer_run.main()
    return status, output.getvalue().splitlines()


def test_the_runner_counts_each_kind(tmp_path: Path) -> None:
    """Tests of a checkout see mlagen as FlashInfer, and one that fails is the runner's status."""
    status, lines = run(tmp_path, "--verbose", test_deepseek_mla=TESTS)

    assert status == 1
    counts = "1 failed, 1 left out, 3 out of memory, 1 passed"
    assert f"test_deepseek_mla.py as 9.0: {counts}" in lines
    assert lines[0].startswith("failed\ttest_deepseek_mla.py::test_that_fails")
    assert "mlagen.errors.ArgumentError: ckv_cache" in lines[0]
    assert lines[-1] == f"in all: {counts}"


def test_files_of_the_wrapper_of_batch_decode_test_it(tmp_path: Path) -> None:
    """They see mlagen's wrapper, which has more names than the reference of other files."""
    status, lines = run(tmp_path, test_decode_prefill_lse=WRAPPER)

    assert (status, lines[-1]) == (0, "in all: 1 passed")


def test_summaries_of_shards_add_up() -> None:
    """Counts are sums, and a shard counts once."""
    outcomes = [Outcome("a::b", "passed", "", "a"), Outcome("a::c", "failed", "E", "a")]
    shards = [summary_of(outcomes[:end], 1.0, f"{end}/2", "whole") for end in (1, 2)]

    total = added(shards)

    assert total["selections"] == {"a": {"passed": 2, "failed": 1}}
    assert total["shards"] == ["1/2", "2/2"]
    with pytest.raises(ValueError, match="disjoint shards of one run"):
        added([shards[0], shards[0]])


def test_what_a_summary_tells(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts of each selection, and a difference that no longer is one; not run is a failure."""
    pattern = read_differences()[0].pattern
    outcomes = [
        Outcome(pattern, "passed", "", "a"),
        Outcome("b::c", "left out", "Skipped: x: no part of mlagen", "a"),
        Outcome("b::d", "out of memory", "E", "b"),
    ]

    assert told(summary_of(outcomes, 1.0, "1/1", "whole")) == 0

    text = capsys.readouterr().out.splitlines()
    assert text == [
        "a: 1 left out, 1 passed",
        "b: 1 out of memory",
        f"{pattern}: listed as different, and passes",
        "in all: 1 left out, 1 out of memory, 1 passed",
    ]
    assert told(summary_of([Outcome("b", "not run", "", "b")], 1.0, "1/1", "whole")) == 1


def test_failures_that_the_list_has_are_intended() -> None:
    """A test that fails as it is listed is intended, any other is a failure; skips are told."""
    rows = [
        Difference("test_a.py::test_one[[]*", "ArgumentError: q", "because"),
        Difference("test_b.py::*", "", "so"),
    ]
    wanted = {  # the kind of each entry; of two entries of a test, the last counts
        ("test_a.py::test_one[1]", "failed", "a.py:1: ArgumentError: query"): "intended",
        ("test_a.py::test_one[2]", "failed", "CUDA error: misaligned address"): "failed",
        ("test_a.py::test_one_more[1]", "failed", "E"): "failed",
        ("test_b.py::test_two", "passed", ""): "passed",
        ("test_c.py::test_three", "skipped", "Skipped: x: no part of mlagen"): "left out",
        ("test_c.py::test_four", "skipped", "Skipped: needs another GPU"): "skipped",
        ("test_c.py::test_five", "skipped", "Skipped: out of memory"): "out of memory",
        ("test_c.py::test_six", "not run", ""): None,
        ("test_c.py::test_six", "passed", ""): "passed",
    }
    names = ("id", "outcome", "reason")

    outcomes = classified([dict(zip(names, entry, strict=True)) for entry in wanted], rows)

    assert [outcome.kind for outcome in outcomes] == [kind for kind in wanted.values() if kind]
    assert outcomes[0].reason == "because"


@pytest.mark.parametrize("difference", read_differences(), ids=lambda row: row.pattern)
def test_the_page_of_differences_names_each_row(difference: Difference) -> None:
    """Each intended difference is of a file that is run, and its reason stands on the page."""
    page = (ROOT / "docs/reference/flashinfer-differences.md").read_text(encoding="utf-8")

    assert difference.pattern.partition("::")[0] in {row.file for row in SELECTIONS}
    assert difference.reason in page
