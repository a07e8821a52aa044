"""Run FlashInfer's own attention tests, unchanged, on mlagen.

``python3 -m tests.flashinfer.run CHECKOUT`` takes a checkout of FlashInfer, or a tar of its folder
``tests``, such as ``git archive HEAD tests/__init__.py tests/attention tests/test_helpers`` writes.
It prints how many tests passed, failed, failed by an intended difference, were skipped by their own
rules, were left out, and ran out of memory, and exits with 1 if a test failed otherwise.

A whole run is several hours: ``--shard 3/24 -n 16 --json 3.json`` runs a part of every file in 16
processes, and ``python3 -m tests.flashinfer.outcomes *.json`` adds the shards. ``--seconds``
stops a run, whose remaining tests are counted as not run; ``--again 3.json`` runs those, and what
failed or ran out of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click

from tests.flashinfer.outcomes import (
    Outcome,
    classified,
    read_differences,
    replaced,
    summary_of,
    told,
)
from tests.flashinfer.selections import SELECTIONS, Selection

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Job(NamedTuple):
    """A process: a piece of the tests of a selection."""

    selection: Selection
    piece: int
    pieces: int
    tests: list[str] | None  # None: all


def main() -> int:
    """Run the tests, print their counts, and return 1 if one failed by no intended difference."""
    given = _arguments()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkout = unpacked(given.checkout.resolve(), folder)
        with ThreadPoolExecutor(given.workers) as workers:
            runs = [
                workers.submit(run_job, job, checkout, folder / f"report{index}", given, begun)
                for index, job in enumerate(jobs_of(given, checkout))
            ]
            outcomes = [outcome for run in runs for outcome in run.result()]
    if given.verbose:
        for outcome in outcomes:
            if outcome.kind not in {"passed", "skipped", "collected"}:
                click.echo(f"{outcome.kind}\t{outcome.test}\t{outcome.reason.splitlines()[-1:]}")
    sample = "pairs" if given.pairs else str(given.limit or "whole")
    summary = summary_of(outcomes, time.monotonic() - begun, given.shard, sample)
    if given.again is not None:
        summary = replaced(json.loads(given.again.read_text(encoding="utf-8")), summary)
    if given.json is not None:
        given.json.write_text(json.dumps(summary, indent=1), encoding="utf-8")
    return told(summary)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.flashinfer.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkout", type=Path, help="a checkout of FlashInfer, or a tar of tests")
    add("files", nargs="*", help="names of test files; all by default")
    add("-k", dest="keyword", default="", help="only tests with this expression")
    add("-n", dest="workers", type=int, default=1, help="processes at once")
    add("--shard", type=_shard, default="1/1", metavar="I/N", help="the I-th of N equal parts")
    add("--seconds", type=float, default=None, help="stop then")
    add("--limit", type=int, default=0, help="at most so many tests of each file, pairs first")
    add("--pairs", action="store_true", help="a sample with each pair of parameters of a test")
    add("--json", type=Path, default=None, help="write a summary")
    add("--again", type=Path, default=None, help="what is open in this summary")
    add("--cpu", action="store_true", help="on CPU tensors, which is slow")
    add("--collect-only", action="store_true", help="import and count the tests")
    add("--verbose", action="store_true", help="list the tests that did not pass")
    return parser.parse_args()


def _shard(text: str) -> str:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"expected I/N, such as 3/20, got {text!r}")
    return text


def unpacked(checkout: Path, folder: Path) -> Path:
    """Return the folder of a checkout; a tar is unpacked into ``folder``."""
    if checkout.is_dir():
        return checkout
    with tarfile.open(checkout) as archive:
        archive.extractall(folder / "checkout", filter="data")
    return folder / "checkout"


def jobs_of(given: argparse.Namespace, checkout: Path) -> Iterator[Job]:
    """Yield the processes of a run, long ones first; a file that the checkout lacks has none."""
    again: dict[str, list[str]] | None = None
    if given.again is not None:
        again = {}
        for entry in json.loads(given.again.read_text(encoding="utf-8"))["open"]:
            again.setdefault(entry["selection"], []).append(entry["test"])
    for selection in SELECTIONS:
        if given.files and selection.file not in given.files:
            continue
        if not (checkout / "tests/attention" / selection.file).exists():
            click.echo(f"{selection.file}: not in the checkout")
            continue
        tests = None if again is None else again.get(str(selection), [])
        if tests is not None and selection.file in tests:  # none of it was run
            tests = None
        if tests != []:
            pieces = selection.pieces if given.workers > 1 else 1
            yield from (Job(selection, piece, pieces, tests) for piece in range(pieces))


def run_job(
    job: Job, checkout: Path, report: Path, given: argparse.Namespace, begun: float
) -> list[Outcome]:
    """Run the tests of a job in a process of their own, and return their outcomes."""
    selection = job.selection
    keywords = [f"({word})" for word in (selection.keyword, given.keyword) if word]
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "flashinfer_plugin", "--noconftest"),
        *("-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore", "-c", os.devnull),
        *("--rootdir", str(checkout), "-k", " and ".join(keywords)),
        *(["--collect-only"] if given.collect_only else []),
        f"tests/attention/{selection.file}",
    ]
    choice: dict[str, Any] = {
        "tests": job.tests,
        "limit": given.limit,
        "pairs": given.pairs,
        "shard": [int(number) for number in given.shard.split("/")],
        "piece": [job.piece, job.pieces],
    }
    environment = {
        **os.environ,
        # The tests import helpers of their own package `tests`.
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, checkout, ROOT))),
        "MLAGEN_SHIM_CAPABILITY": selection.capability,
        "MLAGEN_SHIM_WRAPPER": "mlagen" if selection.tests_wrapper else "",
        "MLAGEN_SHIM_DEVICE": "cpu" if given.cpu else "cuda",
        "MLAGEN_SHIM_CHOICE": json.dumps(choice),
        "MLAGEN_SHIM_REPORT": str(report),
    }
    remaining = None if given.seconds is None else begun + given.seconds - time.monotonic()
    if remaining is not None and remaining <= 0:
        return [Outcome(selection.file, "not run", "out of time", str(selection))]
    why = ""
    try:
        done = subprocess.run(
            command,
            cwd=checkout,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=remaining,
        )
        if done.returncode not in {0, 1, 5}:
            why = f"pytest exits with {done.returncode}"
            click.echo(done.stdout[-2000:] + done.stderr[-2000:])
    except subprocess.TimeoutExpired:
        why = "out of time"
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    outcomes = classified(entries, read_differences(), str(selection))
    if why.startswith("pytest") or (why and not outcomes):
        kind = "failed" if why.startswith("pytest") else "not run"
        outcomes.append(Outcome(selection.file, kind, why, str(selection)))
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
