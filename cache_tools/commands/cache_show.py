"""`mlagen cache show`: one kernel, with its source and what the compiler said."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from mlagen.errors import CacheError

from ..entries import document_of, entries_of
from ..report import json_option, kernel_text, print_facts, print_json, size_text, time_text

if TYPE_CHECKING:
    from mlagen.cache.catalog import StoredEntry

_FILES = {"source": "kernel.cu", "log": "build.log"}


@click.command()
@click.argument("key")
@click.option("--source", "part", flag_value="source", help="Print the CUDA source.")
@click.option("--log", "part", flag_value="log", help="Print what NVRTC and ptxas said.")
@click.option("--manifest", "part", flag_value="manifest", help="Print the manifest, JSON.")
@json_option
def show(*, key: str, part: str | None, as_json: bool) -> None:
    """Show the kernel whose key begins with KEY.

    Six hex digits or more. Every file is checked against its digest first.
    """
    from mlagen.engine import kernel_store

    store = kernel_store()
    entries = entries_of(store, key)
    for stored in entries:
        if problem := stored.problem or store.verify(stored):
            raise CacheError(f"cache: {problem}: {stored.path}", path=stored.path)
    if as_json:
        print_json({"entries": [_document(stored, part) for stored in entries]})
    elif part is not None:
        for stored in entries:
            click.echo(_text(stored, part), nl=False)
    else:
        for stored in entries:
            print_facts(_facts(stored))


def _document(stored: StoredEntry, part: str | None) -> dict[str, Any]:
    document = document_of(stored)
    if part == "manifest":
        document[part] = json.loads(_text(stored, part))
    elif part is not None:
        document[part] = _text(stored, part)
    return document


def _text(stored: StoredEntry, part: str) -> str:
    from mlagen.cache.entry import MANIFEST

    return (stored.path / _FILES.get(part, MANIFEST)).read_text(encoding="utf-8")


def _facts(stored: StoredEntry) -> dict[str, str]:
    document = document_of(stored)
    created = document["created"]
    facts = {
        "kernel": kernel_text(document["family"], document["spec"]),
        "key": stored.key,
        "folder": str(stored.path),
    }
    facts |= {f"  {name}": value for name, value in document["spec"].items()}
    for kernel in document["resources"]:
        spills = kernel["spill_store_bytes"] + kernel["spill_load_bytes"]
        shared_bytes = kernel["static_shared_bytes"] + document["dynamic_shared_bytes"]
        facts[f"ptxas {kernel['symbol']}"] = (
            f"{kernel['registers']} registers, {spills} bytes spilled, "
            f"{kernel['stack_bytes']} bytes of stack, "
            f"{shared_bytes} bytes of shared memory"
        )
    assert stored.manifest is not None
    for name, file in stored.manifest.files.items():
        facts[name] = size_text(file.size)
    facts["compiled"] = (
        f"in {time_text(document['compile_ms'])} by {stored.toolchain}, {created['time']}, "
        f"mlagen {created['mlagen']}, on {created['host']}, by {document['created_by']}"
    )
    return facts
