"""Dumps of ``MLAGEN_DUMP``, read and rebuilt; they come from elsewhere, and are not trusted.

Only tensors are made, and the caches, masks and metadata of :mod:`mlagen.mla`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from mlagen.errors import ArgumentError
from mlagen.mla import MLAPlanMetadata, PagedKVCache, masks
from mlagen.observe.document import is_workspace
from mlagen.observe.dump import FORMAT, MAX_JSON_BYTES, MAX_TENSOR_BYTES, TENSOR_SUFFIX
from mlagen.observe.tensor_file import read_tensors
from mlagen.paths import read_named, reason_of
from mlagen.values import reject, shown

from ..output.report import size_text

PARTS = ("init", "plan", "call")

# Memory that a dump may take beyond its contents: workspaces, and elements of views with repeated
# ones, such as an expanded mask, which a call may copy.
_MAX_WORKSPACE_BYTES = 2 << 30
_MAX_REPEATS, _FEW_BYTES = 16, 64 << 20

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_SCALARS: dict[str, dict[str, Any]] = {
    "dtype": _DTYPES,
    "float": {text: float(text) for text in ("nan", "inf", "-inf")},
}
_OBJECTS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (MLAPlanMetadata, PagedKVCache, *vars(masks).values())
    if isinstance(kind, type) and is_dataclass(kind)
}


@dataclass(frozen=True, kw_only=True)
class Dump:
    """A call, and the construction and plan of its wrapper; arguments are JSON data."""

    path: Path
    entry: str
    arguments: dict[str, dict[str, Any]]  # by part
    storages: dict[str, list[int]]  # bytes of each, by part
    contents: dict[str, torch.Tensor]  # bytes by part and index
    environment: dict[str, str]
    versions: dict[str, str | None]
    gpu: str | None
    is_captured: bool
    has_ended: bool  # whether the call returned or raised
    served_by: list[str]
    error: str | None

    def tensors(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the metadata of each tensor, with the name of its argument."""
        for part in self.arguments.values():
            for name, value in part.items():
                for entry in _entries_in(value):
                    yield name, entry


def read_dump(path: Path) -> Dump:
    """Return the dump in a JSON file, with the contents in the file beside it.

    Raises ArgumentError if it cannot be read or is no whole dump; the message names the file and
    what is wrong.
    """
    try:
        data = json.loads(read_named(path, max_bytes=MAX_JSON_BYTES))
    except OSError as error:
        raise ArgumentError(f"{path}: expected a readable file, got {reason_of(error)}") from error
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or "mlagen_dump" not in data:
        raise ArgumentError(f"{path}: expected a file of MLAGEN_DUMP, got another")
    if data["mlagen_dump"] != FORMAT:
        reject(str(path), f"a dump of format {FORMAT}", shown(data["mlagen_dump"]))
    try:
        return _dump_of(path, data)
    except RecursionError:
        raise ArgumentError(f"{path}: expected fewer nested values, got too many") from None


def rebuilt(dump: Dump, gpu: torch.device | None) -> dict[str, dict[str, Any]]:
    """Return the arguments of each part; tensors that were on a GPU are on ``gpu``, if any.

    Raises ArgumentError if they are not those of a call, or do not fit into memory.
    """
    if not dump.contents and any(not is_workspace(name) for name, _ in dump.tensors()):
        rule = "contents (MLAGEN_DUMP_TENSORS=1, at most 4 GiB, outside of a capture)"
        reject(str(dump.path), rule, "none")
    _require_memory(dump, gpu)
    made = {}
    for part, arguments in dump.arguments.items():
        builder = _Builder(dump, part, gpu)
        made[part] = {name: builder.decode(value, name) for name, value in arguments.items()}
    return made


class _Builder:
    """The arguments of a part, with tensors laid out in memory as they were."""

    def __init__(self, dump: Dump, part: str, gpu: torch.device | None) -> None:
        self._dump, self._part, self._gpu = dump, part, gpu
        self._made: dict[int, torch.Tensor] = {}

    def decode(self, value: Any, name: str) -> Any:
        """Return an argument, or a part of one."""
        if not isinstance(value, (dict, list)):
            return value
        if isinstance(value, list) or not value:
            reject(name, "an argument", shown(value))
        kind, inner = next(iter(value.items()))
        known = _SCALARS.get(kind, {})
        if kind == "tensor" and isinstance(inner, dict):
            result: Any = self._tensor(inner, name)
        elif kind in {"list", "tuple"} and isinstance(inner, list):
            items = [self.decode(item, f"{name}[{index}]") for index, item in enumerate(inner)]
            result = items if kind == "list" else tuple(items)
        elif isinstance(inner, str) and inner in known:
            result = known[inner]
        elif kind == "object" and isinstance(inner, str) and inner in _OBJECTS:
            result = self._object(_OBJECTS[inner], value.get("fields"), name)
        else:
            reject(name, "an argument that a dump can hold", shown(inner))
        return result

    def _object(self, kind: Any, given: Any, name: str) -> object:
        if not isinstance(given, dict) or not set(given) <= {each.name for each in fields(kind)}:
            reject(name, f"fields of {kind.__name__}", given)
        values = {key: self.decode(value, f"{name}.{key}") for key, value in given.items()}
        try:
            return kind(**values)
        except TypeError:  # a field without a default is missing
            reject(name, f"all fields of {kind.__name__}", list(given))

    def _tensor(self, entry: dict[str, Any], name: str) -> torch.Tensor:
        dtype, shape, strides = entry.get("dtype"), entry.get("shape"), entry.get("strides")
        offset: Any = entry.get("offset")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            reject(f"{name}.dtype", "a dtype", shown(dtype))
        kind = _DTYPES[dtype]
        if not (_are_sizes(shape) and _are_sizes(strides) and _are_sizes([offset])):
            reject(name, "shape, strides and offset", [shape, strides, offset])
        start = int(offset)
        limit = _MAX_REPEATS * sum(map(len, self._dump.contents.values())) + _FEW_BYTES
        if not is_workspace(name) and math.prod(shape) * kind.itemsize > limit:
            reject(f"{name}.shape", f"at most {limit} bytes for these contents", shape)
        storage = self._storage(entry, name)
        try:
            whole = storage[: len(storage) // kind.itemsize * kind.itemsize].view(kind)
            tensor = whole.as_strided(shape, strides, start // kind.itemsize)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0][:100]
            raise ArgumentError(
                f"{name}: expected a tensor in its storage, got {reason}"
            ) from error
        if start % kind.itemsize:
            reject(f"{name}.offset", f"a multiple of {kind.itemsize}", start)
        if entry.get("requires_grad") and kind.is_floating_point:
            tensor.requires_grad_()
        return tensor

    def _storage(self, entry: dict[str, Any], name: str) -> torch.Tensor:
        """Return the bytes of a tensor's storage; those of a workspace are not set."""
        index, sizes = entry.get("storage"), self._dump.storages[self._part]
        if not isinstance(index, int) or not 0 <= index < len(sizes):
            reject(f"{name}.storage", f"an index below {len(sizes)}", shown(index))
        device = (self._gpu if _is_on_gpu(entry) else None) or "cpu"
        if index not in self._made:
            content = self._dump.contents.get(f"{self._part}:{index}")
            if content is None and is_workspace(name):
                self._made[index] = torch.empty(sizes[index], dtype=torch.uint8, device=device)
            elif content is None:
                reject(name, "contents in the dump", "none")
            else:
                self._made[index] = content.to(device, copy=True)
        return self._made[index]


def _require_memory(dump: Dump, gpu: torch.device | None) -> None:
    dumped = sum(map(len, dump.contents.values()))
    needed = sum(map(sum, dump.storages.values()))
    if needed - dumped > _MAX_WORKSPACE_BYTES:
        reject("storages", f"workspaces of at most {size_text(_MAX_WORKSPACE_BYTES)}", needed)
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if gpu is not None:
        limit = min(limit, torch.cuda.mem_get_info(gpu)[0])
    if needed > limit:
        reject("storages", f"tensors of at most {size_text(limit)} to replay here", needed)


def _dump_of(path: Path, data: dict[str, Any]) -> Dump:
    def typed(of: Mapping[str, Any], name: str, kind: type, default: Any = ...) -> Any:
        value = of.get(name)
        if value is None and default is not ...:
            return default
        if not isinstance(value, kind):
            reject(f"{path}: {name}", f"a value of type {kind.__name__}", shown(value))
        return value

    outcome = typed(data, "outcome", dict, {})
    parts = {name: typed(data, name, dict, {}) for name in PARTS}
    parts = {name: part for name, part in parts.items() if part}
    storages = {name: typed(part, "storages", list) for name, part in parts.items()}
    for name, sizes in storages.items():
        if not _are_sizes(sizes, len(sizes)):
            reject(f"{path}: {name}.storages", "sizes in bytes", sizes)
    has_tensors = typed(data, "has_tensors", bool)
    beside = path.with_suffix(TENSOR_SUFFIX)
    contents = read_tensors(beside, MAX_TENSOR_BYTES) if has_tensors else {}
    for name, sizes in storages.items():
        for index, size in enumerate(sizes):
            content = contents.get(f"{name}:{index}")
            if content is not None and len(content) != size:
                reject(f"{beside}: {name}:{index}", f"{size} bytes", len(content))
    names = ("mlagen", "torch", "cuda", "driver")
    return Dump(
        path=path,
        entry=typed(data, "entry", str),
        arguments={name: typed(part, "arguments", dict) for name, part in parts.items()},
        storages=storages,
        contents=contents,
        environment={
            str(name): str(value) for name, value in typed(data, "environment", dict).items()
        },
        versions={name: typed(data, name, str, None) for name in names},
        gpu=typed(typed(data, "gpu", dict, {}), "name", str, None),
        is_captured=typed(data, "is_captured", bool),
        has_ended=bool(outcome),
        served_by=[str(name) for name in typed(outcome, "served_by", list, [])],
        error=typed(outcome, "error", str, None),
    )


def _entries_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and isinstance(value.get("tensor"), dict):
        yield value["tensor"]
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _entries_in(inner)


def _is_on_gpu(entry: Mapping[str, Any]) -> bool:
    return str(entry.get("device")).startswith("cuda")


def was_on_gpu(dump: Dump) -> bool:
    """Whether the call had a tensor on a GPU."""
    return any(_is_on_gpu(entry) for _, entry in dump.tensors())


def _are_sizes(values: Any, most: int = 16) -> TypeGuard[list[int]]:
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(value.__class__ is int and 0 <= value < 1 << 48 for value in values)
    )
