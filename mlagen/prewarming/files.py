"""Files that name kernels: tables of prewarm options in TOML or JSON, and records of runs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mlagen.errors import ArgumentError
from mlagen.paths import read_named, reason_of
from mlagen.prewarming.machine import parse_archs
from mlagen.prewarming.selection import selected_specs
from mlagen.spec.families import specs_on_arch
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.text import parse_spec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLE = "kernel"

# The options of `mlagen prewarm` that select kernels, with the type of their values.
_ARGUMENTS = {"arch": str, "model": str, "tp": int, "dcp": int, "kernel": str}
_ARGUMENTS |= {"family": str, "heads": int, "kv_heads": int, "q_len": int}
_WANTED = {"dtype": str, "kv_dtype": str, "page_size": int, "kv_lora_rank": int, "head_dim": int}
_WANTED |= {"qk_rope_head_dim": int, "lookup": str, "values": str, "mask": str}
KEYS = _ARGUMENTS | _WANTED

_PARAMETERS = {"model": "models", "kernel": "kernels", "family": "families"}
_logger = logging.getLogger("mlagen")


def read_input_file(path: Path) -> bytes:
    """Return the content of a file.

    Raises ArgumentError if it cannot be read, is not a regular file, or is too large; the message
    names it.
    """
    try:
        return read_named(path)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: expected a readable file, got {reason_of(error)}") from error


def read_spec_file(
    name: str,
    content: bytes | None = None,
    *,
    archs: str | Iterable[str] = "native",
    on_left_out: Callable[[str], None] = lambda _: None,
) -> list[KernelSpec]:
    """Return the kernels that a file in TOML or JSON selects, without duplicates.

    ``content`` is read from the file ``name`` if it is None. ``archs`` applies to tables without
    ``arch``; ``on_left_out`` is that of :func:`selected_specs`. Raises ArgumentError if it cannot
    be read or parsed, or one of its tables is invalid; the message names file and table;
    UnsupportedError if ``native`` finds no supported GPU.
    """
    content = read_input_file(Path(name)) if content is None else content
    is_json = name.endswith(".json") or content.lstrip().startswith(b"{")
    language, parse = ("JSON", json.loads) if is_json else ("TOML", tomllib.loads)
    try:
        document = parse(content.decode())
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{name}: expected {language}, got {error}") from error
    tables = document.get(_TABLE) if isinstance(document, dict) else None
    if not isinstance(tables, list) or not tables or len(document) > 1:
        got = ", ".join(map(repr, document)) if isinstance(document, dict) else ""
        rule = f"a list of tables {_TABLE!r}, and nothing else"
        raise ArgumentError(f"{name}: expected {rule}, got {got or 'nothing'}")
    specs: dict[KernelSpec, None] = {}
    for number, table in enumerate(tables, start=1):
        where = f"{name}: {_TABLE} {number}"
        arguments = _arguments_of(where, table)
        try:
            made = selected_specs(
                arguments.pop("arch", archs), on_left_out=on_left_out, **arguments
            )
        except ArgumentError as error:
            raise ArgumentError(f"{where}: {error}") from error
        specs |= dict.fromkeys(made)
    return list(specs)


def _arguments_of(where: str, table: object) -> dict[str, Any]:
    """Return a table as arguments of :func:`selected_specs`."""
    if not isinstance(table, dict):
        raise ArgumentError(f"{where}: expected a table, got {table!r}")
    for key in table:
        if key not in KEYS:
            raise ArgumentError(f"{where}: expected keys out of {', '.join(KEYS)}, got {key!r}")
    values = {key: _values_of(f"{where}: {key}", KEYS[key], table[key]) for key in table}
    wanted = {key: values.pop(key) for key in tuple(values) if key in _WANTED}
    return {_PARAMETERS.get(key, key): value for key, value in values.items()} | {"wanted": wanted}


def _values_of(where: str, kind: type, value: object) -> Sequence[Any]:
    several = value if isinstance(value, list) else [value]
    for one in several:
        if type(one) is not kind:  # bool is not int
            rule = "a number" if kind is int else "a text"
            raise ArgumentError(f"{where}: expected {rule} or a list of them, got {value!r}")
    return several


def read_record(path: Path, *, archs: str | Iterable[str] | None = None) -> list[KernelSpec]:
    """Return the kernels of a record, without duplicates.

    With ``archs``, return the kernels that the same calls take on these architectures instead. An
    incomplete line, from a run that ended while writing it, is skipped with a warning. Raises
    ArgumentError if the file cannot be read, or a line is not a record of a kernel; the message
    names both; UnsupportedError if ``native`` finds no supported GPU.
    """
    content = read_input_file(path)
    specs: dict[KernelSpec, None] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        if _is_incomplete(line):
            _logger.warning("%s:%d: skipped a line without its end", path, number)
            line = line[max(line.rfind(b'{"'), 0) :]  # noqa: PLW2901 - of a later run, behind it
            if _is_incomplete(line):
                continue
        try:
            specs[_kernel_of(line)] = None
        except ValueError as error:
            raise ArgumentError(f"{path}:{number}: {error}") from error
    if archs is None:
        return list(specs)
    wanted = parse_archs(archs)
    elsewhere = (other for spec in specs for arch in wanted for other in specs_on_arch(spec, arch))
    return list(dict.fromkeys(elsewhere))


def _is_incomplete(line: bytes) -> bool:
    """Whether a line begins as a record and is none, maybe with a later record behind its half."""
    if line.startswith(b"{"):
        try:
            json.loads(line)
        except json.JSONDecodeError:
            return True
        except (ValueError, RecursionError):  # complete; the caller rejects it
            pass
    return False


def _kernel_of(line: bytes) -> KernelSpec:
    try:
        record = json.loads(line)
        kernel = record["kernel"] if isinstance(record, dict) else None
    except (ValueError, KeyError, RecursionError):
        kernel = None
    if not isinstance(kernel, str):
        text = line.decode(errors="replace")
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise ArgumentError(f'expected a record such as {{"kernel": "..."}}, got {shown!r}')
    return parse_spec(kernel)
