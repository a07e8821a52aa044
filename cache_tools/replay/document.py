"""Dump files of ``MLAGEN_DUMP``; they come from elsewhere, and are not trusted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mlagen.errors import ArgumentError
from mlagen.observe.dump import FORMAT, MAX_JSON_BYTES
from mlagen.paths import read_named, reason_of

_PARTS = ("call", "init", "plan")
_MAX_DIMS = 16
_MAX_SIZE = 1 << 48


@dataclass(frozen=True, kw_only=True)
class Part:
    """The arguments of a call as JSON data, and the bytes of each storage of its tensors."""

    arguments: dict[str, Any]
    storages: list[int]


@dataclass(frozen=True, kw_only=True)
class Dump:
    """A valid dump; ``parts`` are the call, and the construction and plan of a wrapper."""

    path: Path
    entry: str
    parts: dict[str, Part]
    environment: dict[str, str]
    versions: dict[str, str | None]
    gpu: str | None
    is_captured: bool
    tensors: Path | None
    has_ended: bool  # whether the call returned or raised
    served_by: list[str]
    error: str | None


def read_dump(path: Path) -> Dump:
    """Return the dump in a file.

    Raises
    ------
    ArgumentError
        If it cannot be read or is no dump; the message names the file and what is wrong.
    """
    try:
        content = read_named(path, max_bytes=MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: expected a readable file, got {reason_of(error)}") from error
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or "mlagen_dump" not in data:
        raise ArgumentError(f"{path}: expected a file of MLAGEN_DUMP, got another")
    if data["mlagen_dump"] != FORMAT:
        got = _shown(data["mlagen_dump"])
        raise ArgumentError(f"{path}: expected a dump of format {FORMAT}, got {got}")
    try:
        return _dump_of(path, data)
    except RecursionError:
        raise ArgumentError(f"{path}: expected fewer nested values, got too many") from None


def reject(where: str, rule: str, got: object) -> NoReturn:
    """Raise the error for a value of a dump.

    Raises
    ------
    ArgumentError
        Always.
    """
    raise ArgumentError(f"{where}: expected {rule}, got {_shown(got)}")


def tensors_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the metadata of the tensors of an argument."""
    if isinstance(value, list):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, dict):
        entry = value.get("tensor")
        if isinstance(entry, dict) and "dtype" in entry:
            yield entry
        else:
            for inner in value.values():
                yield from tensors_in(inner)


def check_tensor(where: str, entry: dict[str, Any], storages: list[int]) -> None:
    """Check the metadata of a tensor but its dtype.

    Raises
    ------
    ArgumentError
        If it is not metadata of a tensor in one of ``storages``.
    """
    for name in ("shape", "strides"):
        sizes = entry.get(name)
        if not isinstance(sizes, list) or len(sizes) > _MAX_DIMS or not all(map(_is_size, sizes)):
            reject(f"{where}.{name}", "sizes", sizes)
    if len(entry["shape"]) != len(entry["strides"]):
        reject(f"{where}.strides", f"{len(entry['shape'])} numbers", entry["strides"])
    if not _is_size(entry.get("offset")):
        reject(f"{where}.offset", "a number of bytes", entry.get("offset"))
    index = entry.get("storage")
    if not isinstance(index, int) or not 0 <= index < len(storages):
        reject(f"{where}.storage", f"an index below {len(storages)}", index)
    for name in ("device", "dtype"):
        if not isinstance(entry.get(name), str):
            reject(f"{where}.{name}", "a name", entry.get(name))


def _dump_of(path: Path, data: dict[str, Any]) -> Dump:
    environment = _typed(path, data, "environment", dict)
    outcome = _typed(path, data, "outcome", dict, optional=True) or {}
    gpu = _typed(path, data, "gpu", dict, optional=True) or {}
    tensors = _typed(path, data, "tensors", str, optional=True)
    if tensors is not None and (Path(tensors).name != tensors or tensors[:1] in {"", "."}):
        reject(f"{path}: tensors", "the name of a file beside it", tensors)
    names = ("mlagen", "torch", "cuda", "driver")
    parts = {name: data.get(name) for name in _PARTS}
    return Dump(
        path=path,
        entry=_typed(path, data, "entry", str),
        parts={
            name: _part(f"{path}: {name}", part) for name, part in parts.items() if part is not None
        },
        environment={str(name): str(value) for name, value in environment.items()},
        versions={name: _typed(path, data, name, str, optional=True) for name in names},
        gpu=_typed(path, gpu, "name", str, optional=True),
        is_captured=_typed(path, data, "is_captured", bool),
        tensors=None if tensors is None else path.parent / tensors,
        has_ended=bool(outcome),
        served_by=[
            str(name) for name in _typed(path, outcome, "served_by", list, optional=True) or ()
        ],
        error=_typed(path, outcome, "error", str, optional=True),
    )


def _typed(
    path: Path, data: dict[str, Any], name: str, kind: type, *, optional: bool = False
) -> Any:
    value = data.get(name)
    if not isinstance(value, kind) and not (optional and value is None):
        reject(f"{path}: {name}", f"a value of type {kind.__name__}", value)
    return value


def _part(where: str, part: Any) -> Part:
    if not isinstance(part, dict) or not isinstance(part.get("arguments"), dict):
        reject(where, "arguments", part)
    storages = part.get("storages")
    if not isinstance(storages, list) or not all(map(_is_size, storages)):
        reject(f"{where}.storages", "sizes in bytes", storages)
    return Part(arguments=part["arguments"], storages=storages)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value.__class__ is int and 0 <= value <= _MAX_SIZE


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
