"""What commands print: tables and text for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Command = TypeVar("Command", bound=Callable[..., Any])

# As many digits of a key as a list shows; `cache show` and `cache rm` accept them.
SHORT_KEY = 8

# Wide enough for any row, so that lines written to a file or a pipe are not broken.
_UNLIMITED = 10_000


def json_option(command: Command) -> Command:
    """Add ``--json``, which every command has."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is given."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNLIMITED
    return Console(
        stderr=stderr, width=width, color_system=None, highlight=False, markup=False, emoji=False
    )


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document on stdout."""
    click.echo(json.dumps(document, indent=1, ensure_ascii=False))


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows under the names of their fields; what is None leaves its cell empty."""
    from rich.table import Table

    output = console()
    names, gap = {name: name for name in rows[0]}, 2
    widths = [max(len(name), *(len(_cell(row[name])) for row in rows)) for name in names]
    if sum(widths) + gap * len(widths) > output.width:
        names, gap = {name: name.replace("_", "_\n") for name in rows[0]}, 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for name, header in names.items():
        is_number = all(isinstance(row[name], int | float | None) for row in rows)
        table.add_column(header, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    _print_stripped(output, table)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print named facts, one to a line."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, _cell(value))
    _print_stripped(console(), table)


def size_text(size_bytes: int) -> str:
    """Return a size as people read it."""
    for shift, unit in ((30, "GiB"), (20, "MiB")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.1f} {unit}"
    return f"{size_bytes / 1024:.0f} KiB" if size_bytes >= 1024 else f"{size_bytes} B"


def time_text(ms: float) -> str:
    """Return a duration as people read it."""
    if ms >= 1000:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms" if ms >= 1 else f"{ms * 1000:.0f} us"


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """Return ``1 kernel`` or ``2 kernels``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def kernel_columns(family: str, ingredients: Mapping[str, str]) -> dict[str, str]:
    """Return what a list says of a kernel: what calls name it by, not how it is tuned."""
    given = ingredients.get
    dims = [given(name, "") for name in ("kv_lora_rank", "qk_rope_head_dim") if given(name)]
    return {
        "kernel": family,
        "arch": given("arch", ""),
        "dtype": given("query_dtype", given("dtype", "")),
        "kv_dtype": given("kv_dtype", ""),
        "dims": "+".join(dims) or given("head_dim", given("head_dim_vo", "")),
        "form": _form(ingredients),
        "page_size": given("page_size", ""),
        "tile_rows": given("tile_rows", ""),
    }


def _form(ingredients: Mapping[str, str]) -> str:
    """Return in what a kernel differs from the usual one of its family."""
    from mlagen.spec.selection import USUAL

    given = [(ingredients.get(name, ""), usual) for name, usual in USUAL.items()]
    words = [value for value, usual in given if value and value not in usual]
    out = ingredients.get("out_dtype")
    if out != ingredients.get("query_dtype") and out:
        words.append(f"{out} out")
    return ", ".join(words)


def kernel_text(family: str, ingredients: Mapping[str, str]) -> str:
    """Return :func:`kernel_columns` on one line."""
    columns = kernel_columns(family, ingredients)
    named = [f"{label} {value}" for label, value in columns.items() if value and label in _NAMED]
    return " ".join([columns["kernel"], columns["arch"], columns["dtype"], *named])


_NAMED = ("kv_dtype", "dims", "form", "page_size", "tile_rows")


def resource_columns(
    kernels: Sequence[Mapping[str, Any]], dynamic_shared_bytes: int
) -> dict[str, int]:
    """Return what ptxas said of an entry's kernels, and a block's shared memory; sizes in bytes."""
    static = max(kernel["static_shared_bytes"] for kernel in kernels)
    return {
        "registers": max(kernel["registers"] for kernel in kernels),
        "spill_bytes": sum(k["spill_store_bytes"] + k["spill_load_bytes"] for k in kernels),
        "shared_bytes": static + dynamic_shared_bytes,
    }


def _print_stripped(output: Console, table: Table) -> None:
    # Rich fills the last column with blanks; they would be in the way in files and comparisons.
    with output.capture() as captured:
        output.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _cell(value: object) -> str:
    return "" if value is None else str(value)
