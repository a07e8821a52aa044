"""`mlagen cache rm`: remove some kernels."""

from __future__ import annotations

import click

from ..entries import document_of, entries_of
from ..report import SHORT_KEY, console, json_option, print_json, size_text


@click.command()
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@json_option
def rm(*, keys: tuple[str, ...], as_json: bool) -> None:
    """Remove the kernels whose keys begin with KEY.

    Six hex digits or more of each. Nothing is removed unless every KEY stands for exactly one
    kernel.
    """
    from mlagen.engine import kernel_store

    store, text = kernel_store(), console(stderr=as_json)
    found = {stored.path: stored for key in keys for stored in entries_of(store, key)}
    for stored in found.values():
        store.remove(stored)
        size = size_text(stored.size_bytes)
        text.print(f"removed {stored.key[:SHORT_KEY]} by {stored.toolchain}, {size}")
    if as_json:
        print_json({"removed": [document_of(stored) for stored in found.values()]})
