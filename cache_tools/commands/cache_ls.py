"""`mlagen cache ls`: list of the cached kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..options.entry_options import (
    Choice,
    age_option,
    arch_option,
    family_option,
    layers_option,
    toolchain_option,
)
from ..output.report import (
    SHORT_KEY,
    age_text,
    count_text,
    json_option,
    kernel_columns,
    natural_order,
    print_json,
    print_table,
    resource_columns,
    size_text,
)
from ..tools.entries import document_of

if TYPE_CHECKING:
    from mlagen.cache.store import StoredEntry


@click.command()
@arch_option
@family_option
@toolchain_option
@age_option
@click.option(
    "--sort",
    type=click.Choice(["name", "size", "age", "spills"]),
    default="name",
    show_default=True,
    help="By name; or the largest, least recently used or most spilling first.",
)
@layers_option
@json_option
def ls(*, sort: str, layers: bool, as_json: bool, **chosen: Any) -> None:
    """List the cached kernels, sorted by their columns.

    Manifests are read but not verified: mlagen cache verify detects changes.
    """
    from mlagen.cache.store import kernel_store

    store, choice = kernel_store(), Choice(**chosen)
    # One at a time, so that the rest of each manifest is freed at once.
    lines = [_line(stored) for stored in store.entries(layers=layers) if choice.matches(stored)]
    lines.sort(key=_name)
    if sort != "name":
        lines.sort(key=_ORDERS[sort])
    if as_json:
        print_json({"cache_dir": str(store.root), "entries": [line.entry for line in lines]})
    else:
        _print(lines, store.root)


class _Line(NamedTuple):
    """An entry as JSON data, and its kernel columns: none if it has a problem, of that kind."""

    entry: dict[str, Any]
    columns: dict[str, str]
    kind: str


def _line(stored: StoredEntry) -> _Line:
    entry = document_of(stored)
    if entry["problem"] is not None:
        return _Line(entry, {}, "damaged" if stored.is_damaged else "unreadable")
    columns = kernel_columns(entry["family"], entry["spec"])
    if entry["line_info"] is not None:
        columns["variant"] = ", ".join(filter(None, (columns["variant"], "line info")))
    return _Line(entry, columns, "valid")


def _name(line: _Line) -> list[tuple[int, int, str]]:
    return natural_order([*line.columns.values(), line.entry["toolchain"]])


def _spills(line: _Line) -> int:
    resources = line.entry["resources"]
    return resource_columns(resources, 0)["spill_bytes"] if resources else 0


_ORDERS: dict[str, Callable[[_Line], Any]] = {
    "size": lambda line: -line.entry["size_bytes"],
    "age": lambda line: line.entry["used"] or "",
    "spills": lambda line: -_spills(line),
}


def _print(lines: Sequence[_Line], cache_dir: Path) -> None:
    entries = [line.entry for line in lines]
    rows = [_row(line) for line in lines if line.columns]
    for name in ("toolchain", "layer"):
        if len({row[name] for row in rows}) == 1:
            for row in rows:
                del row[name]  # the last line has it
    if rows:
        print_table(rows)
    for entry, _, kind in lines:
        if entry["problem"] is not None:
            click.echo(f"{kind}: {entry['key'][:SHORT_KEY]}: {entry['problem']}")
    kernels = count_text(len(entries), "kernel")
    toolchains = sorted({entry["toolchain"] for entry in entries})
    by = f" by {', '.join(toolchains)}" if toolchains else ""
    total = size_text(sum(entry["size_bytes"] for entry in entries))
    layers = dict.fromkeys([str(cache_dir), *(entry["layer"] for entry in entries)])
    click.echo(f"{kernels}{by}, {total}, in {', '.join(layers)}")


def _row(line: _Line) -> dict[str, Any]:
    entry = line.entry
    resources = resource_columns(entry["resources"], entry["dynamic_shared_bytes"])
    return {
        "key": entry["key"][:SHORT_KEY],
        **line.columns,
        "registers": resources["registers"],
        "spill_bytes": resources["spill_bytes"],
        "size": size_text(entry["size_bytes"]),
        "used": _age_of(entry["used"]),
        "toolchain": entry["toolchain"],
        "layer": entry["layer"],
    }


def _age_of(moment: str | None) -> str | None:
    if moment is None:
        return None
    return age_text(time.time() - datetime.fromisoformat(moment).timestamp())
