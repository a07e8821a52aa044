"""Line and branch coverage of each module, and the modules where it is lower than recorded.

``python3 -m tests.coverage_table [--write]`` reads the data that ``make coverage`` has combined.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import click

RECORD = Path(__file__).with_name("coverage.tsv")
_HEADER = "module\tlines\tbranches"


class Coverage(NamedTuple):
    """Percentages of a module."""

    lines: float
    branches: float


def main() -> int:
    """Compare the measured coverage with the record, or write the record."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.coverage_table", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"renew {RECORD.name}")
    write = parser.parse_args().write
    measured = read_measured()
    if write:
        rows = (f"{name}\t{row.lines}\t{row.branches}" for name, row in sorted(measured.items()))
        RECORD.write_text("\n".join((_HEADER, *rows)) + "\n", encoding="utf-8")
        return 0
    fallen = fallen_modules(read_record(), measured)
    for line in fallen:
        click.echo(line)
    click.echo(f"{len(measured)} modules, {len(fallen)} below {RECORD.name}")
    return 1 if fallen else 0


def fallen_modules(recorded: dict[str, Coverage], measured: dict[str, Coverage]) -> list[str]:
    """Return a line for each recorded module whose lines or branches are covered less."""
    lines = []
    for name, was in recorded.items():
        now = measured.get(name)
        if now is None:
            lines.append(f"{name}: recorded, but not measured")
            continue
        lines += [
            f"{name}: {new} % of the {kind}, recorded {old} %"
            for kind, old, new in zip(Coverage._fields, was, now, strict=True)
            if new < old
        ]
    return lines


def read_measured() -> dict[str, Coverage]:
    """Return the coverage that the data file of the working directory holds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "coverage.json")
        command = [sys.executable, "-m", "coverage", "json", "-q", "-o", str(report)]
        subprocess.run(command, check=True)
        files = json.loads(report.read_text(encoding="utf-8"))["files"]
    return {
        name: Coverage(
            _percent(row["summary"]["covered_lines"], row["summary"]["num_statements"]),
            _percent(row["summary"]["covered_branches"], row["summary"]["num_branches"]),
        )
        for name, row in files.items()
    }


def read_record() -> dict[str, Coverage]:
    """Return the recorded coverage."""
    header, *rows = RECORD.read_text(encoding="utf-8").splitlines()
    if header != _HEADER:
        message = f"{RECORD.name}: expected the columns {_HEADER!r}, got {header!r}"
        raise ValueError(message)
    fields = (row.split("\t") for row in rows)
    return {name: Coverage(float(lines), float(branches)) for name, lines, branches in fields}


def _percent(covered: int, total: int) -> float:
    return round(100 * covered / total, 1) if total else 100.0


if __name__ == "__main__":
    sys.exit(main())
