"""`mlagen cache show`: one kernel, with its source and compiler log."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from mlagen.errors import CacheError

from ..output.report import (
    json_option,
    kernel_text,
    print_facts,
    print_json,
    resource_columns,
    size_text,
    time_text,
)
from ..tools.completion import complete_key
from ..tools.entries import entries_of, require_valid

if TYPE_CHECKING:
    from mlagen.cache.store import StoredEntry

_FILES = {"source": "kernel.cu", "log": "build.log"}
_PARTS = (*_FILES, "manifest", "sass", "reproduce")


@click.command()
@click.argument("key", shell_complete=complete_key)
@click.option("--source", is_flag=True, help="Print the CUDA source.")
@click.option("--log", is_flag=True, help="Print the log of NVRTC and ptxas.")
@click.option("--manifest", is_flag=True, help="Print the manifest, JSON.")
@click.option("--sass", is_flag=True, help="Print the SASS, by nvdisasm.")
@click.option(
    "--reproduce",
    is_flag=True,
    help="Print a Python program that recompiles it and compares the cubin.",
)
@json_option
def show(*, key: str, as_json: bool, **parts: bool) -> None:
    """Show the kernel whose key begins with KEY.

    Six hex digits or more; if several compilers built it, all are shown, or only
    KEY/TOOLCHAIN. Every file is checked against its digest first.
    """
    from mlagen.cache.store import kernel_store

    chosen = [name for name in _PARTS if parts[name]]
    if len(chosen) > 1:
        raise click.UsageError(f"part: expected one, got --{' and --'.join(chosen)}")
    part = chosen[0] if chosen else None
    store = kernel_store()
    found = [(stored, require_valid(stored)) for stored in entries_of(store, key)]
    if as_json:
        print_json({"entries": [document | _part(stored, part) for stored, document in found]})
    elif part is not None:
        for stored, _ in found:
            click.echo(_content(stored, part).decode(errors="backslashreplace"), nl=False)
    else:
        for stored, document in found:
            print_facts(_facts(stored, document))


def _part(stored: StoredEntry, part: str | None) -> dict[str, Any]:
    if part is None:
        return {}
    text = _content(stored, part).decode(errors="replace")
    return {part: json.loads(text) if part == "manifest" else text}


def _content(stored: StoredEntry, part: str) -> bytes:
    """Return the requested part; files are returned byte for byte."""
    from mlagen.cache.file import CUBIN, DamageError
    from mlagen.cache.store import read_stored

    from ..tools.disassembly import sass_of
    from ..tools.reproduction import program_of

    assert stored.manifest is not None
    if part == "reproduce":
        return program_of(stored.manifest, stored.path).encode()
    if part == "manifest":
        return json.dumps(json.loads(stored.manifest.to_json()), indent=1).encode() + b"\n"
    try:
        _, _, files = read_stored(stored)
        content = files[_FILES.get(part, CUBIN)]
    except (DamageError, FileNotFoundError, KeyError) as error:
        raise CacheError(f"cache: {error}: {stored.path}", path=stored.path) from error
    return sass_of(content, str(stored.path)).encode() if part == "sass" else content


def _facts(stored: StoredEntry, document: dict[str, Any]) -> dict[str, str]:
    created = document["created"]
    facts = {
        "kernel": kernel_text(document["family"], document["spec"]),
        "key": stored.key,
        "file": str(stored.path),
    }
    facts |= {f"  {name}": value for name, value in document["spec"].items()}
    if document["line_info"] is not None:
        facts["line info"] = f"lines of {document['line_info']}"
    for kernel in document["resources"]:
        resources = resource_columns([kernel], document["dynamic_shared_bytes"])
        facts[f"ptxas {kernel['symbol']}"] = (
            f"{resources['registers']} registers, {resources['spill_bytes']} bytes spilled, "
            f"{kernel['stack_bytes']} bytes of stack, "
            f"{resources['shared_bytes']} bytes of shared memory"
        )
    assert stored.manifest is not None
    for name, file in stored.manifest.files.items():
        facts[name] = size_text(file.size)
    because = f", because: {created['because']}" if created["because"] else ""
    facts["compiled"] = (
        f"in {time_text(document['compile_ms'])} by {stored.toolchain}, {created['time']}, "
        f"mlagen {created['mlagen']}, on {created['host']}, by {document['created_by']}{because}"
    )
    facts["used"] = document["used"] or "never"
    return facts
