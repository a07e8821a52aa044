"""The faults page describes every fault, and names existing tests."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
PAGE = (ROOT / "docs/explanation/faults.md").read_text(encoding="utf-8")

FAULTS = 52

# | item | fault | what happens | test |
ROWS = {
    int(cells[0]): cells[1:]
    for line in PAGE.splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 4
    and cells[0].isdecimal()
}


@cache
def functions_in(file: str) -> set[str]:
    """Return the names of the functions of a file; empty if there is no such file."""
    path = ROOT / file
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_fault_has_a_row() -> None:
    """Each item occurs once, in order."""
    rows = re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)

    assert [int(row) for row in rows] == list(range(1, FAULTS + 1))
    assert list(ROWS) == list(range(1, FAULTS + 1))


@pytest.mark.parametrize("item", range(1, FAULTS + 1))
def test_the_tests_of_a_row_exist(item: int) -> None:
    """A fault has tests, or the row states that it is not covered; no cell is empty."""
    fault, result, tests = ROWS[item]

    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
    missing = [f"{file}::{name}" for file, name in named if name not in functions_in(file)]
    assert fault
    assert result
    assert missing == []
    assert tests.startswith("not covered") or re.fullmatch(r"`[^`]+`(, `[^`]+`)*", tests)
    assert named or tests.startswith("not covered")


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_every_file_of_faults_is_on_the_page(file: str) -> None:
    """A new file of fault tests is listed on the page."""
    assert file == Path(__file__).name or f"tests/faults/{file}::" in PAGE
