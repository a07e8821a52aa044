"""A call as JSON data: its arguments, and how its tensors share memory.

Contents of tensors are no part of it, except lengths, offsets and page ids on the CPU: they decide
the launch, and reading them does not synchronize.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from mlagen.families.common.arguments import INDEX_DTYPES
from mlagen.families.common.launchers import rounded_up

# Base addresses keep their alignment up to this many bytes.
ALIGNMENT = 256

# Arguments whose content does not affect the result.
SCRATCH = (
    *("workspace_buffer", "float_workspace_buffer", "semaphores", "multi_ctas_kv_counter_buffer"),
    *("out", "output", "lse", "request_order"),
)

# Lengths, offsets and page ids.
INDICES = (
    *("seq_lens", "block_tables", "page_table", "cum_seq_lens_q", "q_cu_seq_lens", "valid_length"),
    *("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "kv_len", "sparse_mla_top_k_lens"),
    *("k.block_table", "k.cache_lengths", "causal_seqlens_kv_global"),
    *("indptr", "indices", "last_page_len"),
)
# Before the names of tensors of a plan's metadata object.
OBJECT = "metadata."
_MAX_VALUES = 4096
_MAX_TEXT = 200

# Nested values below are not described.
MAX_DEPTH = 32


@dataclass
class CallDocument:
    """The arguments of a call: ``data`` for JSON, and the tensors by name."""

    data: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def signature(self) -> Hashable:
        """Return a value that is equal for calls that probably take one plan."""
        return tuple((name, _signature(value)) for name, value in self.data["arguments"].items())


def describe_call(arguments: Mapping[str, object]) -> CallDocument:
    """Return the document of a call; a tensor without memory or strides is named only."""
    encoder = _Encoder()
    values = {name: encoder.encode(argument, name) for name, argument in arguments.items()}
    data = {"arguments": values, "storages": encoder.storages.finish()}
    return CallDocument(data, encoder.tensors)


class _Storages:
    """The memory that the tensors of a call use, by storage."""

    def __init__(self) -> None:
        self._indices: dict[tuple[str, int], int] = {}
        self._tensors: list[list[tuple[dict[str, Any], int, int]]] = []

    def add(self, entry: dict[str, Any], tensor: torch.Tensor) -> None:
        """Add a tensor; its entry gets the index of its storage and its offset."""
        key = str(tensor.device), tensor.untyped_storage().data_ptr()
        index = self._indices.setdefault(key, len(self._indices))
        if index == len(self._tensors):
            self._tensors.append([])
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        reach = sum(
            (length - 1) * stride
            for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        end = start + (reach + 1) * size if tensor.numel() else start
        entry["storage"] = index
        self._tensors[index].append((entry, start, end))

    def finish(self) -> list[int]:
        """Return the bytes of each storage that are used; offsets count from the first of them."""
        sizes = []
        for tensors in self._tensors:
            base = min(start for _, start, _ in tensors) // ALIGNMENT * ALIGNMENT
            for entry, start, _ in tensors:
                entry["offset"] = start - base
            sizes.append(max(end for _, _, end in tensors) - base)
        return sizes


class _Encoder:
    """The JSON data of arguments, with the tensors among them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.storages = _Storages()

    def encode(self, value: object, name: str, depth: int = 0) -> Any:
        """Return the data of an argument, or of a part of one."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        parts = parts_of(value)
        if parts is None or depth > MAX_DEPTH:
            return _scalar(value)
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
        self.storages.add(entry, tensor)
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            entry["is_freed"] = True
            return {"tensor": entry}
        is_index = name.removeprefix(OBJECT) in INDICES and tensor.dtype in INDEX_DTYPES
        if is_index and tensor.device.type == "cpu" and tensor.numel() <= _MAX_VALUES:
            entry["values"] = tensor.detach().view(torch.int32).flatten().tolist()
        if name not in SCRATCH:
            self.tensors[name] = tensor
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


def _signature(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(map(_signature, value))
    if not isinstance(value, dict):
        kept = rounded_up(value) if value.__class__ is int else value
        return value.__class__, None if value.__class__ is float else kept
    if "fields" in value:
        fields = value["fields"].items()
        return value["object"], tuple((key, _signature(inner)) for key, inner in fields)
    if "tensor" not in value:
        return tuple((key, _signature(inner)) for key, inner in value.items())
    entry = value["tensor"]
    shape = tuple(entry["shape"])
    if len(shape) == 1:  # page ids of all requests together have another length at every step
        shape = (rounded_up(shape[0]),)
    return shape, tuple(entry["strides"]), entry["dtype"], entry["device"]
