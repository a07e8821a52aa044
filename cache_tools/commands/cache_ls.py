"""`mlagen cache ls`: the cached kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ..entries import document_of
from ..report import (
    SHORT_KEY,
    console,
    count_text,
    json_option,
    kernel_columns,
    print_json,
    print_table,
    resource_columns,
    size_text,
)


@click.command()
@json_option
def ls(*, as_json: bool) -> None:
    """List the cached kernels, in the order of what they are."""
    from mlagen.engine import kernel_store
    from mlagen.settings import current_settings

    cache_dir = current_settings().cache_dir
    documents = [document_of(stored) for stored in kernel_store().entries()]
    if as_json:
        print_json({"cache_dir": str(cache_dir), "entries": documents})
        return
    toolchains = sorted({document["toolchain"] for document in documents})
    rows = [_row(document) for document in documents if document["problem"] is None]
    for row in rows if len(toolchains) == 1 else ():
        del row["toolchain"]  # it stands below
    if rows:
        print_table(sorted(rows, key=_order))
    text = console()
    for document in documents:
        if document["problem"] is not None:
            text.print(f"damaged: {document['key'][:SHORT_KEY]}: {document['problem']}")
    kernels = count_text(len(documents), "kernel")
    total = size_text(sum(document["size_bytes"] for document in documents))
    by = f" by {', '.join(toolchains)}" if toolchains else ""
    text.print(f"{kernels}{by}, {total}, in {cache_dir}", soft_wrap=True)


def _row(document: dict[str, Any]) -> dict[str, Any]:
    resources = resource_columns(document["resources"], document["dynamic_shared_bytes"])
    return {
        "key": document["key"][:SHORT_KEY],
        **kernel_columns(document["family"], document["spec"]),
        "registers": resources["registers"],
        "spill_bytes": resources["spill_bytes"],
        "size": size_text(document["size_bytes"]),
        "toolchain": document["toolchain"],
    }


def _order(row: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    texts = [text for name, text in row.items() if name != "key" and isinstance(text, str)]
    return [(1, int(text), "") if text.isdecimal() else (0, 0, text) for text in texts]
