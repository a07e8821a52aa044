"""What the commands print with --json is what the reference says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
import pytest

from cache_tools.cli import cli
from cache_tools.schemas import DOCUMENT, SCHEMAS
from mlagen.prewarming import PrewarmReport

from .altered import folder_of, recast, use
from .conftest import Run, damage
from .documents import require_document

# What is typed after the name of a command, with the key of a sound kernel for KEY.
ARGUMENTS = {
    "cache show": ("KEY",),
    "cache why": ("KEY",),
    "cache explain": ("KEY", "KEY"),
    "cache prune": ("--older-than", "1h"),
    "cache rm": ("KEY",),
    "cache clear": ("--yes",),
}


@pytest.fixture
def mixed(cached: PrewarmReport, cache_dir: Path) -> str:
    """Return the key of a sound kernel in a cache that has a damaged one and an old one too."""
    first, second = cached.units
    old = recast(folder_of(second, cache_dir), toolchain="nvrtc-12.8.1", keeps=True)
    use(old, age_s=7200, now=time.time())
    (folder_of(second, cache_dir) / "manifest.json").write_text("{")
    return first.key


@pytest.mark.parametrize("command", SCHEMAS)
def test_a_document_has_the_names_and_types_of_its_schema(
    command: str, run: Run, mixed: str
) -> None:
    """Each name is there, in order, and none besides; a damaged kernel has them too."""
    arguments = [mixed if word == "KEY" else word for word in ARGUMENTS.get(command, ())]

    result = run(*command.split(), *arguments, "--json")

    assert result.exit_code == (1 if command == "cache verify" else 0), result.stderr
    require_document(json.loads(result.stdout), SCHEMAS[command])


@pytest.mark.parametrize(
    "command", [command for command in SCHEMAS if "KEY" not in ARGUMENTS.get(command, ())]
)
def test_a_document_on_nothing_fits_its_schema(command: str, run: Run) -> None:
    """Without a cache the same names are there, with nothing in them."""
    result = run(*command.split(), *ARGUMENTS.get(command, ()), "--json")

    assert result.exit_code == 0
    require_document(json.loads(result.stdout), SCHEMAS[command])


def test_a_miss_fits_the_schema_of_why(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """A kernel that is not found is described with the same names as one that is."""
    unit = cached.units[0]
    damage(unit.key, unit.toolchain, cache_dir)

    result = run("cache", "why", str(unit.spec), "--json")

    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["problem"]
    require_document(document, SCHEMAS["cache why"])


def test_an_eviction_fits_the_schema_of_gc(
    run: Run, cached: PrewarmReport, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is evicted is told in the same document."""
    from mlagen.settings import current_settings

    for unit in cached.units:
        use(folder_of(unit, cache_dir), age_s=7200, now=time.time())
    monkeypatch.setenv("MLAGEN_CACHE_MAX_SIZE", "1")
    current_settings.cache_clear()

    document = json.loads(run("cache", "gc", "--json").stdout)

    assert len(document["evicted"]) == 2
    require_document(document, SCHEMAS["cache gc"])


def test_every_type_of_a_schema_is_known() -> None:
    """A part in backquotes is in the same schema, and the schemas are those of commands."""
    for name, schema in SCHEMAS.items():
        command: click.Command = cli
        for word in name.split():
            assert isinstance(command, click.Group)
            command = command.commands[word]
        parts = {
            word
            for part in schema.values()
            for field in part.values()
            for word in _parts(field.type)
        }

        assert parts == set(schema) - {DOCUMENT}


def _parts(kind: str) -> set[str]:
    return {f"`{word}`" for word in kind.split("`")[1::2]}
