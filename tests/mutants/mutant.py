"""A mutant: one line of a kernel, broken, and the tests that have to notice it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One replacement of text in one file; each of ``tests`` fails with it."""

    name: str
    why: str  # what is broken
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # ids of pytest

    def applied(self, text: str) -> str:
        """Return the text of the file with the mutant.

        Raises
        ------
        ValueError
            If ``old`` is not in it exactly once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: expected `old` once, got {text.count(self.old)} times")
        return text.replace(self.old, self.new)


def read_mutants() -> list[Mutant]:
    """Return the mutants of all files of this folder."""
    mutants = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        tables: dict[str, dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))
        for name, facts in tables.items():
            tests = tuple(facts.pop("tests"))
            mutants.append(Mutant(name=name, tests=tests, **facts))
    return mutants
