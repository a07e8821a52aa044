"""What commands print: tables and text for people, one JSON document for programs."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

Command = TypeVar("Command", bound=Callable[..., Any])

# As many digits of a key as a list shows; `cache show` and `cache rm` accept them.
SHORT_KEY = 8

# Wide enough for any row, so that lines written to a file or a pipe are not broken.
_UNLIMITED = 10_000

# Where the names of facts leave less room on a line, their values are not folded to a thread.
_MIN_ROOM = 20


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


def line_width() -> int:
    """Return how many characters of stdout stand on a line."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNLIMITED


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document on stdout: a name on each line, and each object of a list on its own."""
    # Not with `indent`, which json does in Python: it takes ten times as long. And in ASCII, which
    # any stdout can print.
    lines = [f" {json.dumps(name)}: {_json_value(value)}" for name, value in document.items()]
    click.echo("{\n" + ",\n".join(lines) + "\n}")


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows under the names of their fields; what is None leaves its cell empty.

    A field that all rows leave empty has no column.
    """
    names = [name for name in rows[0] if any(row[name] not in ("", None) for row in rows)]
    columns = [[_cell(row[name]) for row in rows] for name in names]
    widths = [max(map(len, column)) for column in columns]
    headers, gap = [[name] for name in names], 2
    if sum(map(max, widths, map(len, names))) + gap * len(names) > line_width():
        headers, gap = [name.replace("_", "_\n").split("\n") for name in names], 1
    widths = [max(width, *map(len, header)) for width, header in zip(widths, headers, strict=True)]
    height = max(map(len, headers))
    numbers = [all(isinstance(row[name], int | float | None) for row in rows) for name in names]
    tops = [[""] * (height - len(header)) + header for header in headers]
    columns = [[*top, *column] for top, column in zip(tops, columns, strict=True)]
    # Column by column: for thousands of rows that is faster than a format for each.
    padded = [
        [cell.rjust(width) if is_number else cell.ljust(width) for cell in column]
        for column, width, is_number in zip(columns, widths, numbers, strict=True)
    ]
    lines = map((" " * gap).join, zip(*padded, strict=True))
    click.echo("\n".join(line.rstrip() for line in lines))


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print named facts, one to a line."""
    indent = max(map(len, facts)) + 2
    room = max(line_width() - indent, _MIN_ROOM)
    lines = []
    for name, value in facts.items():
        folded = [part for line in _cell(value).split("\n") for part in _fold(line, room)]
        heads = [name, *[""] * (len(folded) - 1)]
        lines += [f"{head:{indent}}{part}" for head, part in zip(heads, folded, strict=True)]
    click.echo("\n".join(line.rstrip() for line in lines))


def size_text(size_bytes: int) -> str:
    """Return a size as people read it."""
    for shift, unit in ((30, "GiB"), (20, "MiB")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.1f} {unit}"
    return f"{size_bytes / 1024:.0f} KiB" if size_bytes >= 1024 else f"{size_bytes} B"


def age_text(seconds: float) -> str:
    """Return how long something is ago as people read it."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def time_text(ms: float) -> str:
    """Return a duration as people read it."""
    if ms >= 1000:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms" if ms >= 1 else f"{ms * 1000:.0f} us"


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """Return ``1 kernel`` or ``2 kernels``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def kernel_columns(family: str, key_fields: Mapping[str, str]) -> dict[str, str]:
    """Return what a list says of a kernel: what calls name it by, not how it is tuned."""
    given = key_fields.get
    dims = [given(name, "") for name in ("kv_lora_rank", "qk_rope_head_dim") if given(name)]
    return {
        "kernel": family,
        "arch": given("arch", ""),
        "dtype": given("query_dtype", given("dtype", "")),
        "kv_dtype": given("kv_dtype", ""),
        "dims": "+".join(dims) or given("head_dim", given("head_dim_vo", "")),
        "form": _form(key_fields),
        "page_size": given("page_size", ""),
        "block_m": given("block_m", ""),
    }


def _form(key_fields: Mapping[str, str]) -> str:
    """Return in what a kernel differs from the usual one of its family."""
    from mlagen.spec.selection import USUAL

    given = [(key_fields.get(name, ""), usual) for name, usual in USUAL.items()]
    words = [value for value, usual in given if value and value not in usual]
    out = key_fields.get("out_dtype")
    if out != key_fields.get("query_dtype") and out:
        words.append(f"{out} out")
    if (heads := key_fields.get("heads_per_cta", "1")) != "1":
        words.append(f"{heads} heads a block")
    return ", ".join(words)


def kernel_text(family: str, key_fields: Mapping[str, str]) -> str:
    """Return :func:`kernel_columns` on one line."""
    columns = kernel_columns(family, key_fields)
    named = [f"{label} {value}" for label, value in columns.items() if value and label in _NAMED]
    return " ".join([columns["kernel"], columns["arch"], columns["dtype"], *named])


_NAMED = ("kv_dtype", "dims", "form", "page_size", "block_m")


def natural_order(texts: Iterable[str]) -> list[tuple[int, int, str]]:
    """Return what texts are sorted by where numbers among them count as numbers."""
    return [(1, int(text), "") if text.isdecimal() else (0, 0, text) for text in texts]


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


def _json_value(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
    return json.dumps(value)


def _fold(line: str, room: int) -> list[str]:
    if len(line) <= room:
        return [line]
    return textwrap.wrap(line, room, break_on_hyphens=False)


def _cell(value: object) -> str:
    return "" if value is None else str(value)
