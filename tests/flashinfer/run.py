"""Run FlashInfer's own attention tests, unchanged, on mlagen.

``python3 -m tests.flashinfer.run CHECKOUT`` takes a checkout of FlashInfer, or a tar of its folder
``tests``, such as ``git archive HEAD tests/__init__.py tests/attention tests/test_helpers`` writes.
It prints how many tests passed, failed, failed by an intended difference, and were left out, and
exits with 1 if a test failed otherwise. The last three are listed with ``--verbose``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import click

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DIFFERENCES = HERE / "differences.tsv"
LEFT_OUT = "no part of mlagen"


class Selection(NamedTuple):
    """Tests of a file, and the compute capability that they see.

    FlashInfer's tests ask for the GPU that each of its backends needs, and mlagen's entry points
    work on all.
    """

    file: str
    capability: str = "9.0"
    keyword: str = ""


SELECTIONS = (
    Selection("test_deepseek_mla.py"),
    Selection("test_deepseek_mla.py", "10.0", "cutlass"),
    Selection("test_mla_decode_kernel.py"),
    Selection("test_mla_auto_backend_warning.py"),
    Selection("test_cutlass_mla_fp8_output.py", "10.0"),
    Selection("test_trtllm_gen_mla.py", "10.0"),
    Selection("test_trtllm_gen_mla.py", "12.0", "xqa"),
    Selection("test_cute_dsl_mla_decode.py", "10.0"),
    Selection("test_cute_dsl_mla_dcp.py", "10.0"),
    Selection("test_shared_prefix_kernels.py", keyword="merge_state"),
    Selection("test_sparse_mla_sm120.py", "12.0"),
    Selection("test_trtllm_gen_attention_decode_xqa.py"),
    Selection("test_xqa.py"),
    Selection("test_xqa.py", "12.0", "xqa_mla"),
    Selection("test_xqa_batch_decode.py"),
    Selection("test_xqa_batch_decode.py", "12.0", "nvfp4"),
    Selection("test_xqa_mla_batch_decode.py", "12.0"),
    Selection("test_xqa_mla_bf16.py", "12.0"),
)


class Difference(NamedTuple):
    """An intended difference: a pattern of test ids, and the reason."""

    pattern: str
    reason: str


class Outcome(NamedTuple):
    """What came of a test."""

    test: str
    kind: str  # passed, failed, intended, left out or skipped
    reason: str


def main() -> int:
    """Run the tests, print their counts, and return 1 if one failed by no intended difference."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.flashinfer.run", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of FlashInfer, or a tar of tests")
    parser.add_argument("files", nargs="*", help="names of test files; all by default")
    parser.add_argument("-k", dest="keyword", default="", help="only tests with this expression")
    parser.add_argument("--cpu", action="store_true", help="on CPU tensors, which is slow")
    parser.add_argument("--collect-only", action="store_true", help="import and count the tests")
    parser.add_argument("--limit", type=int, default=0, help="run a sample of each file")
    parser.add_argument("--verbose", action="store_true", help="list the tests that did not pass")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkout = unpacked(given.checkout.resolve(), Path(folder))
        outcomes: list[Outcome] = []
        for selection in SELECTIONS:
            if given.files and selection.file not in given.files:
                continue
            found = run_selection(selection, checkout, Path(folder, "report"), given)
            outcomes += found
            click.echo(f"{selection.file} as {selection.capability}: {counted(found)}")
    if given.verbose:
        for outcome in outcomes:
            if outcome.kind not in {"passed", "skipped"}:
                click.echo(f"{outcome.kind}\t{outcome.test}\t{outcome.reason.splitlines()[-1:]}")
    for difference in stale_differences(outcomes, read_differences()):
        click.echo(f"{difference.pattern}: listed as different, and passes")
    click.echo(f"in all: {counted(outcomes)}")
    return 1 if any(outcome.kind == "failed" for outcome in outcomes) else 0


def unpacked(checkout: Path, folder: Path) -> Path:
    """Return the folder of a checkout; a tar is unpacked into ``folder``."""
    if checkout.is_dir():
        return checkout
    with tarfile.open(checkout) as archive:
        archive.extractall(folder / "checkout", filter="data")
    return folder / "checkout"


def run_selection(
    selection: Selection, checkout: Path, report: Path, given: argparse.Namespace
) -> list[Outcome]:
    """Run the tests of a selection in a process of their own, and return their outcomes."""
    report.unlink(missing_ok=True)
    keywords = [f"({word})" for word in (selection.keyword, given.keyword) if word]
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "flashinfer_plugin", "--noconftest"),
        *("-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore", "-c", os.devnull),
        *("--rootdir", str(checkout), "-k", " and ".join(keywords)),
        *(["--collect-only"] if given.collect_only else []),
        f"tests/attention/{selection.file}",
    ]
    environment = {
        **os.environ,
        # The tests import helpers of their own package `tests`.
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, checkout, ROOT))),
        "MLAGEN_SHIM_CAPABILITY": selection.capability,
        "MLAGEN_SHIM_DEVICE": "cpu" if given.cpu else "cuda",
        "MLAGEN_SHIM_LIMIT": str(given.limit),
        "MLAGEN_SHIM_REPORT": str(report),
    }
    done = subprocess.run(
        command, cwd=checkout, env=environment, check=False, capture_output=True, text=True
    )
    if done.returncode not in {0, 1, 5}:
        click.echo(done.stdout[-2000:] + done.stderr[-2000:])
        return [Outcome(selection.file, "failed", f"pytest exits with {done.returncode}")]
    if given.collect_only:
        tests = [line for line in done.stdout.splitlines() if "::" in line]
        return [Outcome(test, "collected", "") for test in tests]
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    return classified(map(json.loads, lines), read_differences())


def classified(
    entries: Iterable[dict[str, str]], differences: Iterable[Difference]
) -> list[Outcome]:
    """Return the outcomes of tests; failures that the list has are intended."""
    known, outcomes = list(differences), []
    for entry in entries:
        test, kind, reason = Path(entry["id"]).name, entry["outcome"], entry["reason"]
        listed = [row for row in known if fnmatchcase(test, row.pattern)]
        if kind == "failed" and listed:
            kind, reason = "intended", listed[0].reason
        elif kind == "skipped" and LEFT_OUT in reason:
            kind = "left out"
        outcomes.append(Outcome(test, kind, reason))
    return outcomes


def read_differences() -> list[Difference]:
    """Return the intended differences."""
    _, *rows = DIFFERENCES.read_text(encoding="utf-8").splitlines()
    return [Difference(*row.split("\t")) for row in rows]


def stale_differences(
    outcomes: Iterable[Outcome], differences: Iterable[Difference]
) -> list[Difference]:
    """Return the differences that tests were run for, none of which failed."""
    ran = list(outcomes)
    stale = []
    for difference in differences:
        kinds = {o.kind for o in ran if fnmatchcase(o.test, difference.pattern)}
        if "passed" in kinds and "intended" not in kinds:
            stale.append(difference)
    return stale


def counted(outcomes: Iterable[Outcome]) -> str:
    """Return the number of outcomes of each kind."""
    counts = Counter(outcome.kind for outcome in outcomes)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "no tests"


if __name__ == "__main__":
    sys.exit(main())
