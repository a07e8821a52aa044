"""`mlagen cache show`: one kernel, its source and log, and a program that compiles it again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from mlagen.cache.file import CUBIN, HEAD_BYTES
from mlagen.cache.key import CacheKey
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
from ..tools.entries import entries_of, kernel_of, require_valid

if TYPE_CHECKING:
    from pathlib import Path

    from mlagen.cache.file import Manifest
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


_PROGRAM = '''\
"""Compile a kernel as mlagen did, and compare the cubin with the cached one."""

import hashlib
import json
import re
import sys
import zlib
from pathlib import Path

from cuda.bindings import nvrtc

KERNEL = {kernel!r}
ENTRY = Path({entry!r})
NAME = {name!r}
OPTIONS = {options}
TOOLCHAIN = {toolchain!r}
SHA256 = {sha256!r}


def checked(result):
    status, *values = result
    if int(status) != 0:
        sys.exit(f"NVRTC: {{status.name}}")
    return values[0] if values else None


try:
    loaded = "%d.%d" % nvrtc.nvrtcVersion()[1:]
except RuntimeError:  # of cuda.pathfinder
    sys.exit("NVRTC: expected its library, got none; run: pip install nvidia-cuda-nvrtc")
entry = ENTRY.read_bytes()  # head, manifest, cubin, compressed files with the source first
start = {head_bytes} + int.from_bytes(entry[8:12], "little")
files = json.loads(entry[{head_bytes}:start])["files"]
others = zlib.decompress(entry[start + files["kernel.cubin"]["size"] :])
source = others[: files["kernel.cu"]["size"]]
program = checked(nvrtc.nvrtcCreateProgram(source, NAME.encode(), 0, None, None))
options = [option.encode() for option in OPTIONS]
(status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
if int(status) != 0:
    log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    sys.exit(log.decode(errors="replace"))
code = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
checked(nvrtc.nvrtcGetCUBIN(program, code))

release = re.search(rb"Cuda compilation tools, release [0-9.]+, V([0-9.]+)", code)
version = release[1].decode() if release else loaded
compiler = f"nvrtc-{{version}}"
digest = hashlib.sha256(code).hexdigest()
print(f"{{KERNEL}} by {{compiler}}: sha256 {{digest}}")
if digest != SHA256:
    sys.exit(f"expected sha256 {{SHA256}}, built by {{TOOLCHAIN}}")
'''


def program_of(manifest: Manifest, path: Path) -> str:
    """Return the text of the program; it needs cuda-bindings and NVRTC, not mlagen."""
    from mlagen.compiler.nvrtc import PROGRAM_NAME

    options = [
        f"--{label.removeprefix('option.')}{'=' if value else ''}{value}"
        for label, value in manifest.key_fields
        if label.startswith("option.")
    ]
    lines = "".join(f"    {option!r},\n" for option in options)
    return _PROGRAM.format(
        kernel=kernel_of(CacheKey(manifest.key_fields, manifest.toolchain)),
        entry=str(path),
        head_bytes=HEAD_BYTES,
        name=PROGRAM_NAME,
        options=f"[\n{lines}]",
        toolchain=manifest.toolchain,
        sha256=manifest.files[CUBIN].sha256,
    )
