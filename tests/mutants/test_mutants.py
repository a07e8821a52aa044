"""The list of mutants; `make mutants` runs them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from tests.mutants.mutant import ROOT, Mutant, read_mutants

MUTANTS = read_mutants()


def test_names_are_unique() -> None:
    """Two files may not define one name."""
    assert [
        name for name, count in Counter(each.name for each in MUTANTS).items() if count > 1
    ] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant: Mutant) -> None:
    """Its text is in its file once, it changes something, and it has a test."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")

    assert mutant.applied(text) != text
    assert mutant.tests


def test_the_tests_of_all_mutants_exist() -> None:
    """Pytest finds each by its id; it exits with another status if it lacks one."""
    tests = sorted({test for mutant in MUTANTS for test in mutant.tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *tests]

    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert found.returncode == 0, found.stdout
