"""The compilation database that clangd reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlagen.codegen.sources import template_root

from .compile_commands import BUILTINS, write_database

PLAIN = sorted(str(path) for path in template_root().rglob("*.cuh"))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the database as it is on disk."""
    folder = tmp_path_factory.mktemp("editor")
    write_database(folder)
    read: list[dict[str, Any]] = json.loads((folder / "compile_commands.json").read_text())
    return read


def include_folders(entry: dict[str, Any]) -> list[Path]:
    """Return the folders in which a command looks for includes."""
    return [Path(word[2:]) for word in entry["arguments"] if word.startswith("-I")]


def test_every_plain_template_has_one_command(database: list[dict[str, Any]]) -> None:
    """The database has the files that are CUDA as they stand, each once."""
    assert [entry["file"] for entry in database] == PLAIN


def test_the_includes_of_a_file_are_found_once(database: list[dict[str, Any]]) -> None:
    """An editor opens the file that a kernel gets, rendered if it has Jinja."""
    for entry in database:
        for name in re.findall(r'^#include "(.+)"$', Path(entry["file"]).read_text(), re.MULTILINE):
            found = [folder for folder in include_folders(entry) if (folder / name).is_file()]
            assert len(found) == 1, (entry["file"], name)


def test_builtins_are_declared_for_all_that_templates_call() -> None:
    """A name with two underscores is of the compiler: clangd learns of it in one header."""
    used = set()
    for path in PLAIN:
        code = re.sub(r'//[^\n]*|"(?:\\.|[^"\\])*"', "", Path(path).read_text())
        used |= set(re.findall(r"\b(__(?!builtin)[a-z]\w+)\b", code))
    declared = BUILTINS.read_text()
    assert {name for name in used if not re.search(rf"\b{name}\b", declared)} == set()
