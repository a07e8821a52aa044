"""JSON documents of the commands against the reference."""

from __future__ import annotations

import time
from pathlib import Path

import click
import pytest

from cache_tools.cli import cli
from cache_tools.output.schemas import DOCUMENT
from tests.kernels import COMBINE

from .altered import recast, use
from .conftest import Cached, Documented, Run
from .documents import SCHEMA_OF

# Arguments of the commands in a folder with a bundle; KEY stands for the key of a valid kernel.
ARGUMENTS = {
    "cache show": ("KEY",),
    "cache why": ("KEY",),
    "cache explain": ("KEY", "KEY"),
    "cache prune": ("--older-than", "1h"),
    "cache rm": ("KEY",),
    "cache clear": ("--yes",),
    "kernel show": (str(COMBINE),),
    "kernel diff": (str(COMBINE), str(COMBINE)),
    "prewarm": ("--kernel", str(COMBINE), "--bundle", "new.tar.gz"),
    "cache export": ("new.tar.gz", "KEY"),
    "cache import": ("kernels.tar.gz",),
    "cache push": ("new.tar.gz", "KEY"),
    "cache pull": ("kernels.tar.gz",),
}
COMMANDS = [name for name in SCHEMA_OF if name != "replay"]  # it has tests of its own


@pytest.fixture
def mixed(cached: Cached, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the key of a valid kernel in a cache with a damaged and an old one."""
    monkeypatch.chdir(tmp_path)
    run("cache", "export", "kernels.tar.gz")
    old = recast(cached.folders[1], toolchain="nvrtc-12.8.1", keeps=True)
    use(old, age_s=7200, now=time.time())
    (cached.folders[1] / "manifest.json").write_text("{")
    return cached.keys[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_document_has_the_names_and_types_of_its_schema(
    command: str, document: Documented, mixed: str
) -> None:
    """The names are exactly those of the schema, in order, for a damaged kernel too."""
    arguments = [mixed if word == "KEY" else word for word in ARGUMENTS.get(command, ())]

    assert document(*command.split(), *arguments, code=1 if command == "cache verify" else 0)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - ARGUMENTS.keys()))
def test_a_document_of_an_empty_cache_fits_its_schema(command: str, document: Documented) -> None:
    """Without a cache the document has the same names."""
    assert document(*command.split())


@pytest.mark.parametrize("name", SCHEMA_OF)
def test_every_part_of_a_schema_is_known_and_used(name: str) -> None:
    """A part in backquotes is in the same schema, and every schema has a command."""
    command: click.Command = cli
    for word in name.split():
        assert isinstance(command, click.Group)
        command = command.commands[word]
    schema = SCHEMA_OF[name]
    types = " ".join(field.type for part in schema.values() for field in part.values())

    assert {f"`{word}`" for word in types.split("`")[1::2]} == set(schema) - {DOCUMENT}
