"""`mlagen cache rm`: remove kernels by key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mlagen.errors import ArgumentError

from ..output.report import SHORT_KEY, json_option, print_json, size_text
from ..tools.completion import complete_key
from ..tools.entries import document_of, entries_of

if TYPE_CHECKING:
    from mlagen.cache.store import StoredEntry


@click.command()
@click.argument("keys", metavar="KEY...", nargs=-1, required=True, shell_complete=complete_key)
@json_option
def rm(*, keys: tuple[str, ...], as_json: bool) -> None:
    """Remove the kernels whose keys begin with KEY.

    Six hex digits or more of each; KEY/TOOLCHAIN selects the entry of one compiler. Nothing is
    removed unless every KEY matches exactly one kernel outside of read-only layers.
    """
    from mlagen.cache.store import kernel_store

    store = kernel_store()
    found = {stored.path: stored for key in keys for stored in entries_of(store, key)}
    for stored in found.values():
        _require_writable(stored)
    for stored in found.values():
        store.remove(stored)
        size = size_text(stored.size_bytes)
        text = f"removed {stored.key[:SHORT_KEY]} by {stored.toolchain}, {size}"
        click.echo(text, err=as_json)
    if as_json:
        print_json({"removed": [document_of(stored) for stored in found.values()]})


def _require_writable(stored: StoredEntry) -> None:
    if stored.is_read_only:
        short, layer = stored.key[:SHORT_KEY], stored.layer
        raise ArgumentError(f"key: expected a kernel of the cache folder, got {short} in {layer}")
