"""The list of mutants; `make mutants` runs them."""

from __future__ import annotations

import re
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
def test_a_mutant_applies_and_its_tests_exist(mutant: Mutant) -> None:
    """Its text is in its file once, it changes something, and a function has each test's name."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")

    assert mutant.applied(text) != text
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        function = re.split(r"::|\[", name.removesuffix("]"), maxsplit=2)
        source = (ROOT / file).read_text(encoding="utf-8")
        assert any(f"def {part}(" in source for part in function if part.startswith("test_"))
