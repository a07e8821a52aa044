"""JSON documents of the cache commands against the reference."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
import pytest

from cache_tools.cli import cli
from cache_tools.output.schemas import DOCUMENT, SCHEMAS
from mlagen.prewarming import PrewarmReport

from .altered import folder_of, recast, use
from .conftest import Run, damage
from .documents import require_document

# Arguments of the commands; KEY stands for the key of a valid kernel.
ARGUMENTS = {
    "cache show": ("KEY",),
    "cache why": ("KEY",),
    "cache explain": ("KEY", "KEY"),
    "cache prune": ("--older-than", "1h"),
    "cache rm": ("KEY",),
    "cache clear": ("--yes",),
    "kernel show": ("combine(arch=sm_80)",),
    "kernel diff": ("combine(arch=sm_80)", "combine(arch=sm_80)"),
}


@pytest.fixture
def mixed(cached: PrewarmReport, cache_dir: Path) -> str:
    """Return the key of a valid kernel in a cache with a damaged and an old one."""
    first, second = cached.units
    old = recast(folder_of(second, cache_dir), toolchain="nvrtc-12.8.1", keeps=True)
    use(old, age_s=7200, now=time.time())
    (folder_of(second, cache_dir) / "manifest.json").write_text("{")
    return first.key


@pytest.mark.parametrize("command", SCHEMAS)
def test_a_document_has_the_names_and_types_of_its_schema(
    command: str, run: Run, mixed: str
) -> None:
    """The names are exactly those of the schema, in order, for a damaged kernel too."""
    arguments = [mixed if word == "KEY" else word for word in ARGUMENTS.get(command, ())]

    result = run(*command.split(), *arguments, "--json")

    assert result.exit_code == (1 if command == "cache verify" else 0), result.stderr
    require_document(json.loads(result.stdout), SCHEMAS[command])


@pytest.mark.parametrize(
    "command", [command for command in SCHEMAS if "KEY" not in ARGUMENTS.get(command, ())]
)
def test_a_document_of_an_empty_cache_fits_its_schema(command: str, run: Run) -> None:
    """Without a cache the document has the same names."""
    result = run(*command.split(), *ARGUMENTS.get(command, ()), "--json")

    assert result.exit_code == 0
    require_document(json.loads(result.stdout), SCHEMAS[command])


def test_a_miss_fits_the_schema_of_why(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """A kernel that is not found has the same names as one that is."""
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
    """Evicted kernels are listed in the document."""
    from mlagen.settings import current_settings

    for unit in cached.units:
        use(folder_of(unit, cache_dir), age_s=7200, now=time.time())
    monkeypatch.setenv("MLAGEN_CACHE_MAX_SIZE", "1")
    current_settings.cache_clear()

    document = json.loads(run("cache", "gc", "--json").stdout)

    assert len(document["evicted"]) == 2
    require_document(document, SCHEMAS["cache gc"])


def test_every_type_of_a_schema_is_known() -> None:
    """A part in backquotes is in the same schema, and every schema has a command."""
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
