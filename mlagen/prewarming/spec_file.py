"""Spec files: tables of prewarm options in TOML or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mlagen.errors import ArgumentError
from mlagen.prewarming.files import read_input_file
from mlagen.prewarming.selection import selected_specs
from mlagen.spec.kernel import KernelSpec

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


def read_spec_file(
    path: Path,
    *,
    archs: str | Iterable[str] = "native",
    on_left_out: Callable[[str], None] = lambda _: None,
) -> list[KernelSpec]:
    """Return the kernels that a file in TOML or JSON selects, without duplicates.

    ``archs`` applies to tables without ``arch``; ``on_left_out`` is that of :func:`selected_specs`.

    Raises
    ------
    ArgumentError
        If it cannot be read or parsed, or one of its tables is invalid; the message names file and
        table.
    UnsupportedError
        If ``native`` finds no supported GPU.
    """
    content = read_input_file(path)
    is_json = path.suffix == ".json"
    return specs_of_file(str(path), content, is_json=is_json, archs=archs, on_left_out=on_left_out)


def specs_of_file(
    name: str,
    content: bytes,
    *,
    is_json: bool | None = None,
    archs: str | Iterable[str] = "native",
    on_left_out: Callable[[str], None] = lambda _: None,
) -> list[KernelSpec]:
    """Return the kernels that the content of a file selects; ``name`` is for messages.

    If ``is_json`` is None, content that starts with ``{`` is JSON.

    Raises
    ------
    ArgumentError
        As :func:`read_spec_file`.
    UnsupportedError
        If ``native`` finds no supported GPU.
    """
    if is_json is None:
        is_json = content.lstrip().startswith(b"{")
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
