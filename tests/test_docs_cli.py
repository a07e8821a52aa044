"""The pages on the command and the environment match the code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest

from cache_tools.benchmark.outcomes import FIELDS
from cache_tools.cli import cli
from cache_tools.output.schemas import DOCUMENT, SCHEMAS, Schema
from cache_tools.output.transfer_schemas import TRANSFER_SCHEMAS
from cache_tools.replay.outcome import REPLAY
from tests.doc_text import table

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"

HEADER = """\
# The `mlagen` command

This page is the output of `--help`, and for most commands the fields of the `--json` document.
`python3 -m cache_tools` runs the same command in a checkout without an installation.
Exit codes and environment variables are on [their own page](environment.md).

## Shell completion

- bash, in `~/.bashrc`: `eval "$(_MLAGEN_COMPLETE=bash_source mlagen)"`
- zsh, in `~/.zshrc`: `eval "$(_MLAGEN_COMPLETE=zsh_source mlagen)"`
- fish, in `~/.config/fish/completions/mlagen.fish`: `_MLAGEN_COMPLETE=fish_source mlagen | source`

Commands, options, models, targets, GPU names, families, kernel specs and keys are completed.
A spec has brackets: type its quote first, as in `mlagen kernel show 'mla_sm90(`.
"""


def commands(
    command: click.Command = cli, name: str = "mlagen", parent: click.Context | None = None
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield every command by its full name, groups before their subcommands."""
    settings = command.context_settings if parent is None else {}
    context = click.Context(
        command, info_name=name.rpartition(" ")[2], parent=parent, terminal_width=80, **settings
    )
    yield name, command, context
    if isinstance(command, click.Group):
        for subcommand, child in command.commands.items():
            yield from commands(child, f"{name} {subcommand}", context)


def render_page() -> str:
    """Return the page on the command."""
    sections = [HEADER]
    for name, command, context in commands():
        depth = "#" * (1 + len(name.split()))
        sections.append(f"{depth} `{name}`\n\n```text\n{command.get_help(context)}\n```\n")
        sections.extend(DOCUMENTS.get(name, ()))
    return "\n".join(sections)


def document_section(fields: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield the table of each object of a JSON document."""
    yield "With `--json`, the fields of one document, in order:\n"
    for part, names in fields.items():
        rows = [{f"in {part}": f"`{name}`", "meaning": meaning} for name, meaning in names.items()]
        yield "\n".join(table(rows))


def schema_sections(schemas: Mapping[str, Schema]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each command with the tables of its document; equal parts are shown once."""
    shown: dict[str, tuple[str, object]] = {}
    for command, schema in schemas.items():
        sections = ["With `--json`, the fields of one document, in order:\n"]
        again: dict[str, list[str]] = {}
        for part, fields in schema.items():
            first, known = shown.setdefault(part, (command, fields))
            if part != DOCUMENT and first != command and known == fields:
                again.setdefault(first, []).append(part)
                continue
            rows = [
                {f"in {part}": f"`{name}`", "type": field.type, "meaning": field.meaning}
                for name, field in fields.items()
            ]
            sections.append("\n".join(table(rows)))
        for first, parts in again.items():
            link = f"[`mlagen {first}`](#mlagen-{first.replace(' ', '-')})"
            sections.append(f"{', '.join(parts)}: see {link}.\n")
        yield f"mlagen {command}", tuple(sections)


# Commands with the tables of their documents.
DOCUMENTS = {
    "mlagen bench": tuple(document_section(FIELDS)),
    **dict(schema_sections(SCHEMAS)),
    **dict(schema_sections(TRANSFER_SCHEMAS)),
    **dict(schema_sections({"replay": REPLAY})),
}


def test_the_page_on_the_command_is_up_to_date() -> None:
    """docs/reference/cli.md is generated; MLAGEN_ACCEPT=1 renews it."""
    page = REFERENCE / "cli.md"
    if os.environ.get("MLAGEN_ACCEPT"):
        page.write_text(render_page(), encoding="utf-8")

    written = page.read_text(encoding="utf-8")

    renew = "renew with: MLAGEN_ACCEPT=1 python3 -m pytest tests/test_docs_cli.py"
    assert written == render_page(), renew


@pytest.mark.parametrize(
    ("name", "command"), [(name, command) for name, command, _ in commands()], ids=str
)
def test_every_command_and_option_has_help(name: str, command: click.Command) -> None:
    """Every option has a help text, and every command but a group has --json."""
    options = [option for option in command.params if isinstance(option, click.Option)]

    silent = [option.name for option in options if not (option.help or option.hidden)]

    assert command.help, name
    assert silent == []
    assert isinstance(command, click.Group) or "--json" in {o for p in options for o in p.opts}


def test_every_variable_is_on_the_page() -> None:
    """docs/reference/environment.md has a row for each variable of the settings."""
    settings = (ROOT / "mlagen" / "settings.py").read_text(encoding="utf-8")
    page = (REFERENCE / "environment.md").read_text(encoding="utf-8")

    read = set(re.findall(r'"((?:MLAGEN|XDG)_[A-Z_]+|HOME)"', settings))

    assert len(read) >= 5
    assert {name for name in read if f"\n| `{name}` |" not in page} == set()
