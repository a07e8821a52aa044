"""Retired names stay retired: code uses the terms of `docs/reference/glossary.md`.

`retired_names.tsv` has a row for each word, the word to use instead and where it is forbidden:

- `all`, `templates`: an identifier, in code and comments of all trees or of templates,
- `part`: a part of an identifier, in snake or camel case, or of the name of a file,
- `text`: a regular expression that matches anywhere in a line, in upper or lower case; one without
  a space matches in one word.

In prose and examples, the rows of `all` and `text` hold.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "docs/reference/glossary.md"
TREES = ("templates", "mlagen", "cache_tools")
# In prose, a part of an identifier may be plain English: decodes, merge, Hopper.
PROSE = ("docs", "examples", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
SUFFIXES = {".cuh", ".j2", ".md", ".py"}
# Public functions with a part that is retired otherwise.
FLASHINFER_NAMES = {"merge_state", "merge_states", "merge_state_in_place"}
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


@cache
def retired() -> dict[str, dict[str, str]]:
    """Return the retired names of each place, with those to use instead."""
    places: dict[str, dict[str, str]] = {"all": {}, "templates": {}, "part": {}, "text": {}}
    with Path(__file__).with_name("retired_names.tsv").open(encoding="utf-8") as rows:
        for row in csv.DictReader(rows, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True):
            assert row["retired"] not in places[row["where"]], f"{row['retired']} has two rows"
            places[row["where"]][row["retired"]] = row["instead"]
    return places


@cache
def names_in(tree: str) -> dict[str, str]:
    """Return the retired identifiers of a tree."""
    return retired()["all"] | (retired()["templates"] if tree == "templates" else {})


@cache
def retired_part(word: str) -> str | None:
    """Return the retired part of an identifier, if any."""
    split = f"_{'_'.join(PART.findall(word)).lower()}_"
    return next((part for part in retired()["part"] if f"_{part}_" in split), None)


@cache
def phrases() -> re.Pattern[str]:
    """Return a pattern that matches where one of the rows of text with a space does."""
    return re.compile("|".join(text for text in retired()["text"] if " " in text), re.IGNORECASE)


@cache
def retired_texts(text: str) -> tuple[tuple[str, str], ...]:
    """Return what the rows of text match in a word or a line, and what to use instead."""
    return tuple(
        (match[0], instead)
        for pattern, instead in retired()["text"].items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    )


def found_in_line(line: str, tree: str) -> Iterator[tuple[str, str]]:
    """Yield what is retired in a line, and what to use instead."""
    names = names_in(tree)
    for word in WORD.findall(line):
        if word in names:
            yield word, names[word]
        if tree not in PROSE and word not in FLASHINFER_NAMES and (part := retired_part(word)):
            yield part, retired()["part"][part]
    if phrases().search(line) or any(map(retired_texts, WORD.findall(line))):
        yield from retired_texts(line)


def found_in_tree(tree: str, root: Path) -> Iterator[str]:
    """Yield each use of a retired name in a file or folder of ``root``, with file and line."""
    for file in sorted((root / tree).rglob("*")) or [root / tree]:
        if file.suffix in SUFFIXES:
            path = file.relative_to(root)
            lines = ["" if tree in PROSE else str(path.with_suffix("")), *_lines_of(file)]
            for number, line in enumerate(lines):
                for word, instead in found_in_line(line, tree):
                    yield f"{path}:{number}: {word!r}, use {instead!r}"


def _lines_of(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("tree", TREES + PROSE)
def test_no_retired_name_is_used(tree: str) -> None:
    """Every file has the field's names."""
    assert (ROOT / tree).exists()
    assert not (found := list(found_in_tree(tree, ROOT))), "\n".join(found)


def test_a_retired_name_is_found(tmp_path: Path) -> None:
    """Identifiers, file names and words are reported with file and line; in prose few parts are."""
    (tmp_path / "templates").mkdir()
    lines = "wait_for = is_narrow_m;\n// Nobody\nconst int Sight = time.wait_until;"
    (tmp_path / "templates/wide_spans.cuh").write_text(lines)
    (tmp_path / "README.md").write_text("Nobody decodes spans on Hopper by `guard_of`.")

    found = [
        line.partition(":")[2]
        for tree in ("templates", "README.md")
        for line in found_in_tree(tree, tmp_path)
    ]

    assert found == [
        "0: 'spans', use 'ranges'",
        "1: 'wait_for', use 'wait'",
        "1: 'is_narrow', use 'swap_ab'",
        "2: 'Nobody', use 'no reader, no process'",
        "1: 'guard_of', use 'make_guard'",
        "1: 'Nobody', use 'no reader, no process'",
    ]


def test_what_to_use_instead_is_not_retired() -> None:
    """No row sends the reader to a name, or to a word, that another row forbids."""
    for where, names in retired().items():
        tree = "templates" if where == "templates" else "mlagen"
        for old, new in names.items():
            assert new
            assert not list(found_in_line(new, tree)), f"{old} -> {new}"


def test_the_glossary_names_what_exists() -> None:
    """Each name in the second column of the glossary is a word of the code."""
    files = [file for tree in TREES for file in (ROOT / tree).rglob("*") if file.suffix in SUFFIXES]
    known = {word for file in files for word in WORD.findall(file.read_text(encoding="utf-8"))}
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert names
    assert not [name for name in names if not set(WORD.findall(name)) <= known]
