"""The faults page describes every fault, and names existing tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/explanation/faults.md").read_text(encoding="utf-8")
NAMED = r"(not covered.*|`[^`]+`(?:, `[^`]+`)*)"
ROW = re.compile(rf"^\| (\d+) \| .+ \| .+ \| {NAMED} \|$", re.MULTILINE)


def test_every_row_of_the_page_names_tests() -> None:
    """Rows are numbered, each names tests that exist, and every file of fault tests occurs."""
    rows = ROW.findall(PAGE)
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)
    known = {
        (file, node.name)
        for file in {file for file, _ in named}
        if (ROOT / file).is_file()
        for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }

    assert [int(number) for number, _ in rows] == list(range(1, PAGE.count("\n| ")))
    assert [name for name in named if name not in known] == []
    assert all("::test_" in tests or tests.startswith("not covered") for _, tests in rows)
    files = {f"tests/faults/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    assert files - {file for file, _ in named} == {"tests/faults/test_table.py"}
