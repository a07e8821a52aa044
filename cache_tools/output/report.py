"""Output of commands: tables and text, or one JSON document."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mlagen.logs import visible

from ..tools.streams import Visible

if TYPE_CHECKING:
    from rich.console import Console

Command = TypeVar("Command", bound=Callable[..., Any])

# Digits of a key in lists; `cache show` and `cache rm` accept them.
SHORT_KEY = 8

# Wider than any row, so that lines written to a file or a pipe are not wrapped.
_UNLIMITED = 10_000

# Smallest width of the value column, however long the names are.
_MIN_VALUE_WIDTH = 20


def json_option(command: Command) -> Command:
    """Add ``--json``, an option of every command."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints visible text."""
    from rich.console import Console
    from rich.text import Text

    class PlainConsole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            # A Text is what another part of the process writes to a stream beside a bar.
            texts = (Text(visible(str(o))) if isinstance(o, str | Text) else o for o in objects)
            super().print(*texts, **options)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # that cli.py maps to an exit code; rich would exit with 1

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNLIMITED
    # A bar does control the terminal.
    file = stream.unescaped if isinstance(stream, Visible) else stream
    return PlainConsole(
        file=file, width=width, color_system=None, highlight=False, markup=False, emoji=False
    )


def line_width() -> int:
    """Return the line width of stdout in characters."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNLIMITED


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document on stdout: one name per line, and one line per object of a list."""
    # Not with `indent`, which json implements in Python: ten times slower. In ASCII, which any
    # stdout can print.
    lines = [f" {json.dumps(name)}: {_json_value(value)}" for name, value in document.items()]
    click.echo("{\n" + ",\n".join(lines) + "\n}")


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows under the names of their fields; None prints an empty cell.

    A field that is empty in all rows has no column.
    """
    names = [name for name in rows[0] if any(row[name] not in ("", None) for row in rows)]
    columns = [[name, *(visible(_cell(row[name]), kept="") for row in rows)] for name in names]
    widths = [max(map(len, column)) for column in columns]
    number = int | float | Decimal | None
    numbers = [all(isinstance(row[name], number) for row in rows) for name in names]
    # Column by column: for thousands of rows faster than formatting each row.
    padded = [
        [cell.rjust(width) if is_number else cell.ljust(width) for cell in column]
        for column, width, is_number in zip(columns, widths, numbers, strict=True)
    ]
    lines = map("  ".join, zip(*padded, strict=True))
    click.echo("\n".join(line.rstrip() for line in lines))


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print named values, one per line."""
    indent = max(map(len, facts)) + 2
    width = max(line_width() - indent, _MIN_VALUE_WIDTH)
    lines = []
    for name, value in facts.items():
        text = visible(_cell(value))
        folded = [part for line in text.split("\n") for part in _fold(line, width)]
        heads = [visible(name, kept=""), *[""] * (len(folded) - 1)]
        lines += [f"{head:{indent}}{part}" for head, part in zip(heads, folded, strict=True)]
    click.echo("\n".join(line.rstrip() for line in lines))


def size_text(size_bytes: int) -> str:
    """Return a human-readable size."""
    for shift, unit in ((30, "GiB"), (20, "MiB")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.1f} {unit}"
    return f"{size_bytes / 1024:.0f} KiB" if size_bytes >= 1024 else f"{size_bytes} B"


def age_text(seconds: float) -> str:
    """Return a human-readable age."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def time_text(ms: float) -> str:
    """Return a human-readable duration."""
    if ms >= 1000:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms" if ms >= 1 else f"{ms * 1000:.0f} us"


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """Return ``1 kernel`` or ``2 kernels``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def kernel_columns(family: str, key_fields: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of a kernel in lists: what calls select it by, not its tuning."""
    given = key_fields.get
    dims = [given(name, "") for name in ("kv_lora_rank", "qk_rope_head_dim") if given(name)]
    return {
        "kernel": family,
        "arch": given("arch", ""),
        "dtype": given("query_dtype", given("dtype", "")),
        "kv_dtype": given("kv_dtype", ""),
        "dims": "+".join(dims) or given("head_dim", given("head_dim_vo", "")),
        "variant": _variant(key_fields),
        "page_size": given("page_size", ""),
        "block_m": given("block_m", ""),
    }


def _variant(key_fields: Mapping[str, str]) -> str:
    """Return the fields in which a kernel differs from its family's default."""
    from mlagen.spec.families import DEFAULT_FILTERS

    given = [(key_fields.get(name, ""), defaults) for name, defaults in DEFAULT_FILTERS.items()]
    words = [value for value, defaults in given if value and value not in defaults]
    out = key_fields.get("out_dtype")
    if out != key_fields.get("query_dtype") and out:
        words.append(f"{out} out")
    if (heads := key_fields.get("kv_heads_per_cta", "1")) != "1":
        words.append(f"{heads} KV heads per CTA")
    if key_fields.get("has_unaligned_rows") == "True":
        words.append("scales in rows")
    return ", ".join(words)


def kernel_text(family: str, key_fields: Mapping[str, str]) -> str:
    """Return :func:`kernel_columns` on one line."""
    columns = kernel_columns(family, key_fields)
    named = [f"{label} {value}" for label, value in columns.items() if value and label in _NAMED]
    return " ".join([columns["kernel"], columns["arch"], columns["dtype"], *named])


_NAMED = ("kv_dtype", "dims", "variant", "page_size", "block_m")


def natural_order(texts: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return a sort key that orders decimal texts as numbers."""
    # Longer digits are no number of a kernel, and Python reads at most some thousand of them.
    numbers = {text for text in texts if text.isdecimal() and len(text) < 20}
    return [(1, int(text), "") if text in numbers else (0, 0, text) for text in texts]


def resource_columns(
    kernels: Sequence[Mapping[str, Any]], dynamic_shared_bytes: int
) -> dict[str, int]:
    """Return ptxas' resources of an entry's kernels, and the CTA's shared memory; in bytes."""
    static = max(kernel["static_shared_bytes"] for kernel in kernels)
    return {
        "registers": max(kernel["registers"] for kernel in kernels),
        "spill_bytes": sum(k["spill_store_bytes"] + k["spill_load_bytes"] for k in kernels),
        "shared_bytes": static + dynamic_shared_bytes,
    }


def _json_value(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
    return json.dumps(value)


def _fold(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    return textwrap.wrap(line, width, break_on_hyphens=False)


def _cell(value: object) -> str:
    return "" if value is None else str(value)
