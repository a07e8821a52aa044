"""The record of coverage and its comparison."""

from __future__ import annotations

from pathlib import Path

from tests.coverage_table import Coverage, fallen_modules, read_record

ROOT = Path(__file__).resolve().parents[1]


def test_every_module_has_a_row() -> None:
    """A new module is recorded, and a deleted one is not."""
    folders = (ROOT / "mlagen", ROOT / "cache_tools")
    files = {str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*.py")}

    assert set(read_record()) == files


def test_a_module_falls_by_lines_branches_or_absence() -> None:
    """Lower lines, lower branches and a missing module are named; a higher coverage is not."""
    was = dict.fromkeys("abcd", Coverage(90, 80))
    now = {"a": Coverage(89.9, 80), "b": Coverage(90, 79), "c": Coverage(91, 80)}

    assert fallen_modules(was, now) == [
        "a: 89.9 % of the lines, recorded 90 %",
        "b: 79 % of the branches, recorded 80 %",
        "d: recorded, but not measured",
    ]
