"""A call as JSON data, and the memory that its tensors view.

The data has no contents of tensors: a tensor is a view of one of the call's storages, by offset,
shape and strides. Tensors whose bytes overlap share a storage, so aliasing is part of the data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from mlagen.families.common.launchers import rounded_up

# Base addresses keep their alignment up to this many bytes.
ALIGNMENT = 256

_MAX_TEXT = 200

# Nested values below are not described.
MAX_DEPTH = 32


@dataclass
class CallDocument:
    """The arguments of a call: ``data`` for JSON, and the bytes of its storages by index.

    Storages of workspaces alone, whose contents have no effect, are not among the bytes.
    """

    data: dict[str, Any]
    contents: dict[int, torch.Tensor]
    signature: Hashable  # equal for calls that probably take one plan


def describe_call(arguments: Mapping[str, object]) -> CallDocument:
    """Return the document of a call; a tensor without memory or strides is named only."""
    encoder = _Encoder()
    values = {name: encoder.encode(argument, name) for name, argument in arguments.items()}
    sizes, contents = _storages(encoder.views)
    data = {"arguments": values, "storages": sizes}
    return CallDocument(data, contents, tuple(encoder.signature))


def is_workspace(name: str) -> bool:
    """Whether an argument is memory whose contents do not affect a call."""
    return name.endswith("workspace_buffer")


@dataclass
class _View:
    """A tensor of a call, with the range of bytes that it reaches in its storage."""

    name: str
    tensor: torch.Tensor
    entry: dict[str, Any]

    def __post_init__(self) -> None:
        tensor, size = self.tensor, self.tensor.element_size()
        axes = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((length - 1) * stride for length, stride in axes) if tensor.numel() else 0
        self.start = int(tensor.storage_offset()) * size
        self.end = self.start + reach * size
        self.memory = str(tensor.device), tensor.untyped_storage().data_ptr()


def _storages(views: list[_View]) -> tuple[list[int], dict[int, torch.Tensor]]:
    """Return the size of each storage, and its bytes; write index and offset into the entries."""
    groups: list[list[_View]] = []
    for view in sorted(views, key=lambda view: (view.memory, view.start)):
        last = groups[-1] if groups else []
        shares = bool(last) and last[0].memory == view.memory
        if shares and view.start < max(each.end for each in last):
            last.append(view)
        else:
            groups.append([view])
    sizes, contents = [], {}
    for index, group in enumerate(groups):
        base = group[0].start // ALIGNMENT * ALIGNMENT
        size = max(view.end for view in group) - base
        for view in group:
            view.entry |= {"storage": index, "offset": view.start - base}
        sizes.append(size)
        if not all(is_workspace(view.name) for view in group):
            whole = torch.empty(0, dtype=torch.uint8, device=group[0].tensor.device)
            contents[index] = whole.set_(group[0].tensor.untyped_storage(), base, (size,), (1,))
    return sizes, contents


class _Encoder:
    """The JSON data of arguments, with the tensors among them."""

    def __init__(self) -> None:
        self.views: list[_View] = []
        self.signature: list[Hashable] = []

    def encode(self, value: object, name: str, depth: int = 0) -> Any:
        """Return the data of an argument, or of a part of one."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        parts = parts_of(value)
        if parts is None or depth > MAX_DEPTH:
            data = _scalar(value)
            number = rounded_up(data) if data.__class__ is int else str(data)
            self.signature.append((name, number if data.__class__ is not float else float))
            return data
        if isinstance(value, (tuple, list)):
            items = [self.encode(part, f"{name}[{key}]", depth + 1) for key, part in parts]
            return {value.__class__.__name__: items}
        fields = {key: self.encode(part, f"{name}.{key}", depth + 1) for key, part in parts}
        return {"object": value.__class__.__name__, "fields": fields}

    def _tensor(self, tensor: torch.Tensor, name: str) -> dict[str, Any]:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            return _other(tensor)
        entry: dict[str, Any] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "strides": list(tensor.stride()),
            "device": str(tensor.device),
        }
        if tensor.requires_grad:
            entry["requires_grad"] = True
        view = _View(name, tensor, entry)
        if view.end > tensor.untyped_storage().nbytes():
            return {"other": "a tensor without storage"}
        self.views.append(view)
        # Page ids of all requests together have another length at every step.
        shape = tuple(tensor.shape) if tensor.dim() != 1 else rounded_up(len(tensor))
        self.signature.append((name, shape, tensor.stride(), tensor.dtype, tensor.device))
        return {"tensor": entry}


def parts_of(value: object) -> list[tuple[Any, object]] | None:
    """Return the parts of a sequence, cache or mask by index or name; None of another value."""
    if value.__class__ in {tuple, list}:
        assert isinstance(value, (tuple, list))
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and value.__class__.__module__.startswith("mlagen.mla."):
        return list(vars(value).items())
    return None


def _scalar(value: object) -> Any:
    if value is None or value.__class__ in {bool, int}:
        return value
    if isinstance(value, str) and len(value) <= _MAX_TEXT:
        return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return int(value) if isinstance(value, Integral) else _other(value)


def _other(value: object) -> dict[str, str]:
    kind = type(value)
    return {"other": f"{kind.__module__}.{kind.__qualname__}"[:_MAX_TEXT]}
