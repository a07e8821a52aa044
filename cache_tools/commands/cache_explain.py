"""`mlagen cache explain`: differences of two cached kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..output.report import (
    SHORT_KEY,
    json_option,
    print_json,
    print_table,
    resource_columns,
    size_text,
    time_text,
)
from ..tools.completion import complete_key
from ..tools.differences import kernel_of, own_key, print_differences
from ..tools.entries import entry_of, require_valid

if TYPE_CHECKING:
    from mlagen.cache.catalog import StoredEntry


@click.command()
@click.argument("first", metavar="KEY", shell_complete=complete_key)
@click.argument("second", metavar="KEY", shell_complete=complete_key)
@json_option
def explain(*, first: str, second: str, as_json: bool) -> None:
    """Compare two cached kernels.

    Six hex digits or more of each KEY; if several compilers built it, KEY/TOOLCHAIN. Compares
    their key fields, ptxas' resources and compile times.
    """
    from mlagen.cache.default_store import kernel_store

    store = kernel_store()
    pair = [entry_of(store, name) for name in (first, second)]
    documents = [require_valid(store, stored) for stored in pair]
    keys = [own_key(stored) for stored in pair]
    found = keys[0].differences(keys[1])
    mine, theirs = map(_facts, documents)
    if as_json:
        print_json(
            {
                "first": documents[0],
                "second": documents[1],
                "differences": [
                    {"key_field": label, "first": left, "second": right}
                    for label, left, right in found
                ],
                "facts": [
                    {"fact": name, "first": value, "second": theirs[name]}
                    for name, value in mine.items()
                ],
            }
        )
        return
    headers = _headers(*pair)
    for header, key in zip(headers, keys, strict=True):
        click.echo(f"{header}: {kernel_of(key)}")
    if found:
        click.echo()
        print_differences(found, *headers)
    click.echo()
    rows = [
        {"fact": name, headers[0]: _text(name, value), headers[1]: _text(name, theirs[name])}
        for name, value in mine.items()
    ]
    print_table(rows)


def _headers(one: StoredEntry, other: StoredEntry) -> tuple[str, str]:
    if one.key == other.key:
        same = one.toolchain == other.toolchain  # the columns of a table need distinct names
        return ("first", "second") if same else (one.toolchain, other.toolchain)
    digits = SHORT_KEY
    while one.key[:digits] == other.key[:digits]:
        digits += 4
    return one.key[:digits], other.key[:digits]


def _facts(document: dict[str, Any]) -> dict[str, Any]:
    resources = document["resources"]
    return {
        **resource_columns(resources, document["dynamic_shared_bytes"]),
        "stack_bytes": max(kernel["stack_bytes"] for kernel in resources),
        "size_bytes": document["size_bytes"],
        "compile_ms": document["compile_ms"],
        "compiled": document["created"]["time"],
        "host": document["created"]["host"],
        "mlagen": document["created"]["mlagen"],
        "created_by": document["created_by"],
    }


def _text(name: str, value: Any) -> str:
    if name == "size_bytes":
        return size_text(value)
    return time_text(value) if name == "compile_ms" else str(value)
