"""The pages on the command and the environment match the code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cache_tools.cli import cli
from tests.cli_documents import DOCUMENTS, sections_of

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"


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


def render_page(page: str) -> str:
    """Return the page on the command: a head, and for each command its help and its tables."""
    sections = [page.partition("## `mlagen`\n")[0].removesuffix("\n")]
    written = sections_of(page)
    for name, command, context in commands():
        depth = "#" * (1 + len(name.split()))
        text = written.get(name.removeprefix("mlagen").strip(), "")
        _, _, tables = text.partition("\n```\n")
        help_text = f"{depth} `{name}`\n\n```text\n{command.get_help(context)}\n```\n"
        sections.append(f"{help_text}{tables.rstrip()}\n" if tables.strip() else help_text)
    return "\n".join(sections)


def test_every_document_has_a_schema() -> None:
    """Each command with --json has tables; each part that a type names is one of them."""
    with_json = {name.removeprefix("mlagen ") for name, command, _ in commands() if command.params}
    groups = {"mlagen", "cache", "kernel"}
    assert DOCUMENTS.keys() == with_json - groups - {"doctor", "demo"}
    for schema in DOCUMENTS.values():
        types = " ".join(kind for part in schema.values() for kind in part.values())
        assert {f"`{word}`" for word in types.split("`")[1::2]} == schema.keys() - {"the document"}


def test_the_page_on_the_command_is_up_to_date() -> None:
    """Help texts in docs/reference/cli.md are generated; MLAGEN_ACCEPT=1 renews them."""
    page = REFERENCE / "cli.md"
    expected = render_page(page.read_text(encoding="utf-8"))
    if os.environ.get("MLAGEN_ACCEPT"):
        page.write_text(expected, encoding="utf-8")
    renew = "renew with: MLAGEN_ACCEPT=1 python3 -m pytest tests/test_docs_cli.py"
    assert page.read_text(encoding="utf-8") == expected, renew


@pytest.mark.parametrize(
    ("name", "command"), [(name, command) for name, command, _ in commands()], ids=str
)
def test_every_command_and_option_has_help(name: str, command: click.Command) -> None:
    """Every option has a help text, and every command but a group has --json."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    assert command.help, name
    assert [option.name for option in options if not (option.help or option.hidden)] == []
    assert isinstance(command, click.Group) or "--json" in {o for p in options for o in p.opts}


def test_every_variable_is_on_the_page() -> None:
    """docs/reference/environment.md has a row for each variable of the settings."""
    settings = (ROOT / "mlagen" / "settings.py").read_text(encoding="utf-8")
    page = (REFERENCE / "environment.md").read_text(encoding="utf-8")
    read = set(re.findall(r'"((?:MLAGEN|XDG)_[A-Z_]+|HOME)"', settings))
    assert len(read) >= 5
    assert {name for name in read if f"\n| `{name}` |" not in page} == set()
