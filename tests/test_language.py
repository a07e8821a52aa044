"""Retired names stay retired: code uses the terms of `docs/reference/glossary.md`.

`retired_names.tsv` has a row for each word, the word to use instead and where it is forbidden:

- `all`, `templates`: an identifier, in code, comments and file names of all trees or of templates,
- `types`: the name of a type in templates, as a word plain English,
- `files`: the name of a file or folder, as a word plain English,
- `part`: a part of an identifier, in snake or camel case,
- `text`: a regular expression that matches anywhere in a line, in upper or lower case.

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
TYPE = re.compile(r"\b(?:class|struct|enum)\s+(\w+)")

Names = dict[str, str]  # each retired name with the one to use instead


@cache
def retired() -> dict[str, Names]:
    """Return the retired names of each place."""
    places: dict[str, Names] = {}
    with Path(__file__).with_name("retired_names.tsv").open(encoding="utf-8") as rows:
        for row in csv.DictReader(rows, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True):
            names = places.setdefault(row["where"], {})
            assert row["retired"] not in names, f"{row['retired']} has two rows"
            names[row["retired"]] = row["instead"]
    return places


def names_in(tree: str) -> Names:
    """Return the retired identifiers of a tree."""
    return retired()["all"] | (retired()["templates"] if tree == "templates" else {})


@cache
def retired_part(word: str) -> str | None:
    """Return the retired part of an identifier, if any."""
    split = f"_{'_'.join(PART.findall(word)).lower()}_"
    return next((part for part in retired()["part"] if f"_{part}_" in split), None)


@cache
def any_text() -> re.Pattern[str]:
    """Return a pattern that matches where one of the rows of text does."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in retired()["text"]), re.IGNORECASE)


def found_in_path(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what is retired in the name of a file or folder, and what to use instead."""
    names = names_in(path.parts[0]) | retired()["files"]
    for part in path.parts:
        for word in part.split(".")[0].split("-"):
            if word in names:
                yield word, names[word]
            if retired_word := retired_part(word):
                yield retired_word, retired()["part"][retired_word]
            for pattern, instead in retired()["text"].items():
                if match := re.search(pattern, word, re.IGNORECASE):
                    yield match[0], instead


def found_in_line(line: str, tree: str) -> Iterator[tuple[str, str]]:
    """Yield what is retired in a line, and what to use instead."""
    names = names_in(tree)
    types = retired()["types"] if tree == "templates" else {}
    for match in WORD.finditer(line):
        if match[0] in FLASHINFER_NAMES:
            continue
        if match[0] in names:
            yield match[0], names[match[0]]
        if tree not in PROSE and (part := retired_part(match[0])):
            yield part, retired()["part"][part]
    for match in TYPE.finditer(line):
        if match[1] in types:
            yield match[1], types[match[1]]
    if any_text().search(line):
        for pattern, instead in retired()["text"].items():
            for match in re.finditer(pattern, line, re.IGNORECASE):
                yield match[0], instead


def found_in_tree(tree: str, root: Path) -> Iterator[str]:
    """Yield each use of a retired name in a file or folder of ``root``, with file and line."""
    for file in sorted((root / tree).rglob("*")) or [root / tree]:
        if file.suffix not in SUFFIXES:
            continue
        path = file.relative_to(root)
        for word, instead in [] if tree in PROSE else found_in_path(path):
            yield f"{path}: its name has {word!r}, use {instead!r}"
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for word, instead in found_in_line(line, tree):
                yield f"{path}:{number}: {word!r}, use {instead!r}"


@pytest.mark.parametrize("tree", TREES + PROSE)
def test_no_retired_name_is_used(tree: str) -> None:
    """Every file has the field's names."""
    assert (ROOT / tree).exists()
    assert not (found := list(found_in_tree(tree, ROOT))), "\n".join(found)


def test_a_retired_name_is_found(tmp_path: Path) -> None:
    """Identifiers, types, file names and words are reported with file and line."""
    (tmp_path / "templates").mkdir()
    lines = (
        "wait_for = is_narrow_m;\n// Nobody\nstruct Sight {\nconst Sight = 1;  // time.wait_until"
    )
    (tmp_path / "templates/wide_spans.cuh").write_text(lines)

    found = {line.partition(":")[2] for line in found_in_tree("templates", tmp_path)}

    assert found == {
        " its name has 'spans', use 'ranges'",
        "1: 'wait_for', use 'wait'",
        "1: 'is_narrow', use 'swap_ab'",
        "2: 'Nobody', use 'no reader, no process'",
        "3: 'Sight', use 'KvRange'",
    }


def test_prose_may_have_parts_in_plain_english(tmp_path: Path) -> None:
    """A page may say Hopper, but no retired identifier or word."""
    (tmp_path / "README.md").write_text("Nobody decodes spans on Hopper by `guard_of`.")

    found = [line.partition(": ")[2] for line in found_in_tree("README.md", tmp_path)]

    assert found == ["'guard_of', use 'make_guard'", "'Nobody', use 'no reader, no process'"]


def test_what_to_use_instead_is_not_retired() -> None:
    """No row sends the reader to a name, or to a word, that another row forbids."""
    for where, names in retired().items():
        tree = "templates" if where in {"templates", "types"} else "mlagen"
        for old, new in names.items():
            assert not list(found_in_line(new, tree)), f"{old} -> {new}"


def test_every_row_has_a_known_place() -> None:
    """A row whose place is misspelled would forbid nothing."""
    assert set(retired()) == {"all", "templates", "types", "files", "part", "text"}
    assert all(
        old and new and old != new for names in retired().values() for old, new in names.items()
    )


def test_the_glossary_names_what_exists() -> None:
    """Each name in the second column of the glossary is a word of the code."""
    files = [file for tree in TREES for file in (ROOT / tree).rglob("*") if file.suffix in SUFFIXES]
    known = {word for file in files for word in WORD.findall(file.read_text(encoding="utf-8"))}
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert names
    assert not [name for name in names if not set(WORD.findall(name)) <= known]
