"""What came of FlashInfer's tests, and the sum of several runs.

``python3 -m tests.flashinfer.outcomes FILE...`` adds the files that ``run --json`` writes, one for
each shard, and names the shards that are missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import click

DIFFERENCES = Path(__file__).resolve().parent / "differences.tsv"
LEFT_OUT = "no part of mlagen"
OUT_OF_MEMORY = "out of memory"

# Kinds that a list of ids says nothing more about.
_PLAIN = frozenset({"passed", "skipped", "left out"})
OPEN = ("failed", "not run", OUT_OF_MEMORY)  # what a later run may try again


class Difference(NamedTuple):
    """An intended difference: a pattern of test ids, how they fail, and the reason."""

    pattern: str
    failure: str  # a part of the error; a test that fails in another way is a failure
    reason: str


class Outcome(NamedTuple):
    """What came of a test."""

    test: str
    kind: str  # passed, failed, intended, left out, skipped, out of memory or not run
    reason: str
    selection: str = ""


def read_differences() -> list[Difference]:
    """Return the intended differences."""
    _, *rows = DIFFERENCES.read_text(encoding="utf-8").splitlines()
    return [Difference(*row.split("\t")) for row in rows]


def classified(
    entries: Iterable[dict[str, str]], differences: Iterable[Difference], selection: str = ""
) -> list[Outcome]:
    """Return the outcomes of tests, the last of each; failures that the list has are intended."""
    known, latest = list(differences), {entry["id"]: entry for entry in entries}
    outcomes = []
    for entry in latest.values():
        test, kind, reason = Path(entry["id"]).name, entry["outcome"], entry["reason"]
        listed = [row for row in known if fnmatchcase(test, row.pattern) and row.failure in reason]
        if kind == "failed" and listed:
            kind, reason = "intended", listed[0].reason
        elif kind == "skipped" and LEFT_OUT in reason:
            kind = "left out"
        elif kind == "skipped" and OUT_OF_MEMORY in reason:
            kind = OUT_OF_MEMORY
        outcomes.append(Outcome(test, kind, reason, selection))
    return outcomes


def shown(counts: dict[str, int]) -> str:
    """Return counts as text."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "no tests"


def summary_of(outcomes: Sequence[Outcome], seconds: float, shard: str, sample: str) -> Any:
    """Return the outcomes as a document that :func:`added` takes."""
    by_selection: dict[str, Counter[str]] = {}
    listed: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        by_selection.setdefault(outcome.selection, Counter())[outcome.kind] += 1
        for row in read_differences():
            if fnmatchcase(outcome.test, row.pattern):
                listed.setdefault(row.pattern, Counter())[outcome.kind] += 1
    why = Counter(
        _last_line(o.reason).removeprefix("Skipped: ") for o in outcomes if o.kind == "left out"
    )
    return {
        "shards": [shard],
        "sample": sample,
        "seconds": round(seconds),
        "selections": {name: dict(counts) for name, counts in by_selection.items()},
        "differences": {pattern: dict(counts) for pattern, counts in listed.items()},
        "left out": dict(why.most_common()),
        "open": [
            {"kind": o.kind, "selection": o.selection, "test": o.test, "why": _last_line(o.reason)}
            for o in outcomes
            if o.kind in OPEN
        ],
    }


def added(summaries: Sequence[Any]) -> Any:
    """Return the sum of the documents of disjoint shards.

    Raises
    ------
    ValueError
        If a shard is there twice, or the shards are of different samples or numbers.
    """
    shards = [shard for summary in summaries for shard in summary["shards"]]
    kinds = {(s["sample"], shard.partition("/")[2]) for s in summaries for shard in s["shards"]}
    if len(shards) != len(set(shards)) or len(kinds) != 1:
        raise ValueError(f"expected disjoint shards of one run, got {sorted(shards)} of {kinds}")
    total: dict[str, Any] = {"shards": shards, "sample": summaries[0]["sample"]}
    total["seconds"] = sum(summary["seconds"] for summary in summaries)
    for part in ("selections", "differences"):
        total[part] = {}
        for name, counts in (pair for s in summaries for pair in s[part].items()):
            total[part][name] = dict(Counter(total[part].get(name, {})) + Counter(counts))
    total["left out"] = dict(sum((Counter(s["left out"]) for s in summaries), Counter()))
    total["open"] = [entry for summary in summaries for entry in summary["open"]]
    return total


def replaced(before: Any, again: Any) -> Any:
    """Return a document whose open tests have the outcomes of ``again``."""
    closed = {
        "shards": [],
        "seconds": before["seconds"],
        "selections": {name: dict(counts) for name, counts in before["selections"].items()},
        "open": [],
    }
    for entry in before["open"]:
        closed["selections"][entry["selection"]][entry["kind"]] -= 1
    parts = [before | closed, again | {"shards": before["shards"], "sample": before["sample"]}]
    return added(parts)


def stale_differences(summary: Any) -> list[str]:
    """Return the patterns of differences that tests were run for, none of which failed."""
    return [
        pattern
        for pattern, counts in summary["differences"].items()
        if counts.get("passed") and not counts.get("intended")
    ]


def told(summary: Any) -> int:
    """Print a summary; return 1 if a test failed by no intended difference or was not run."""
    counts: Counter[str] = Counter()
    for selection, of_selection in summary["selections"].items():
        click.echo(f"{selection}: {shown(of_selection)}")
        counts.update(of_selection)
    for pattern in stale_differences(summary):
        click.echo(f"{pattern}: listed as different, and passes")
    click.echo(f"in all: {shown(counts)}")
    return 1 if counts["failed"] or counts["not run"] else 0


def main() -> int:
    """Print the sum of the given files, with every test that a later run may try again."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.flashinfer.outcomes")
    parser.add_argument("files", nargs="+", type=Path, help="what run --json wrote")
    files = parser.parse_args().files
    total = added([json.loads(file.read_text(encoding="utf-8")) for file in files])
    for reason, count in total["left out"].items():
        click.echo(f"left out\t{count}\t{reason}")
    for entry in total["open"]:
        click.echo("\t".join(entry[name] for name in ("kind", "selection", "test", "why")))
    of = int(total["shards"][0].partition("/")[2])
    missing = [f"{i}/{of}" for i in range(1, of + 1) if f"{i}/{of}" not in total["shards"]]
    status = told(total)
    click.echo(f"{total['seconds']} s, sample: {total['sample']}, missing shards: {missing}")
    return 1 if missing else status


def _last_line(reason: str) -> str:
    return (reason.splitlines() or [""])[-1]


if __name__ == "__main__":
    sys.exit(main())
