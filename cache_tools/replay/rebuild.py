"""Arguments of a dump, with tensors laid out in memory as they were."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from mlagen.mla import batch_contract, flare_kv, masks

from ..output.report import size_text
from .document import Part, check_tensor, reject

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_SCALARS: dict[Any, dict[str, Any]] = {
    "dtype": _DTYPES,
    "float": {text: float(text) for text in ("nan", "inf", "-inf")},
}
_OBJECTS: dict[str, type] = {
    "MLAPlanMetadata": batch_contract.MLAPlanMetadata,
    "PagedKVCache": flare_kv.PagedKVCache,
    **{
        name: kind
        for name, kind in vars(masks).items()
        if isinstance(kind, type) and issubclass(kind, masks.Mask)
    },
}


@dataclass(frozen=True)
class Leaf:
    """A tensor of a call, with its metadata."""

    tensor: torch.Tensor
    entry: dict[str, Any]


class Rebuilt:
    """The arguments of a call: ``arguments`` by name, and ``leaves``, their tensors, by path.

    Tensors of a GPU are on ``device``. With ``source``, storages are copies of its storages.
    """

    def __init__(self, part: Part, device: torch.device, source: Rebuilt | None = None) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._part = part
        self._device = device
        self._source = source
        self._storages: dict[int, torch.Tensor] = {}
        self.arguments = {name: self._decode(value, name) for name, value in part.arguments.items()}

    def _decode(self, value: Any, name: str) -> Any:
        if not isinstance(value, (dict, list)):
            return value
        if isinstance(value, list) or not value:
            reject(name, "an argument", value)
        kind, inner = next(iter(value.items()))
        decode = _SCALARS.get(kind)
        if kind == "tensor" and isinstance(inner, dict):
            result: Any = self._tensor(inner, name)
        elif kind in {"list", "tuple"} and isinstance(inner, list):
            items = [self._decode(item, f"{name}[{index}]") for index, item in enumerate(inner)]
            result = items if kind == "list" else tuple(items)
        elif decode is not None and isinstance(inner, str) and inner in decode:
            result = decode[inner]
        elif kind == "object" and isinstance(inner, str) and inner in _OBJECTS:
            result = self._object(_OBJECTS[inner], value.get("fields"), name)
        elif kind == "other":
            reject(name, "an argument that a dump can hold", inner)
        else:
            reject(name, "an argument", value)
        return result

    def _object(self, kind: Any, given: Any, name: str) -> object:
        known = {field.name for field in fields(kind)} if is_dataclass(kind) else set()
        if not isinstance(given, dict) or not set(given) <= known:
            reject(name, f"fields of {kind.__name__}", given)
        values = {key: self._decode(value, f"{name}.{key}") for key, value in given.items()}
        return kind(**values)

    def _tensor(self, entry: dict[str, Any], name: str) -> torch.Tensor:
        check_tensor(name, entry, self._part.storages)
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            reject(f"{name}.dtype", "a dtype", entry["dtype"])
        shape, strides, offset = entry["shape"], entry["strides"], entry["offset"]
        axes = list(zip(shape, strides, strict=True))
        size = dtype.itemsize
        distinct = math.prod(length for length, stride in axes if stride)
        reach = sum((length - 1) * stride for length, stride in axes) + 1
        available = self._part.storages[entry["storage"]]
        if math.prod(shape) and (offset + reach * size > available or distinct * size > available):
            reject(f"{name}.shape", f"elements within {available} bytes", shape)
        if offset % size:
            reject(f"{name}.offset", f"a multiple of {size}", offset)
        storage = self._storage(entry, name)
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        tensor.set_(storage.untyped_storage(), offset // size, shape, strides)
        if entry.get("is_freed"):
            storage.untyped_storage().resize_(0)
        else:
            self.leaves[name] = Leaf(tensor, entry)
        if entry.get("requires_grad") and dtype.is_floating_point:
            tensor.requires_grad_()
        return tensor

    def _storage(self, entry: dict[str, Any], name: str) -> torch.Tensor:
        index, device = entry["storage"], self._device_of(entry["device"])
        if index not in self._storages:
            if self._source is None or entry.get("is_freed"):
                size = self._part.storages[index]
                storage = torch.empty(size, dtype=torch.uint8, device=device)
            else:
                storage = self._source.storage(index).to(self._device, copy=True)
            self._storages[index] = storage
        storage = self._storages[index]
        if storage.device.type != device.type:
            reject(f"{name}.device", "the device of its storage", entry["device"])
        return storage

    def storage(self, index: int) -> torch.Tensor:
        """Return a storage as bytes."""
        return self._storages[index]

    def _device_of(self, text: str) -> torch.device:
        return self._device if text.startswith("cuda") else torch.device("cpu")


def require_memory(parts: dict[str, Part], device: torch.device) -> None:
    """Reject a dump whose tensors do not fit in the memory of the device or of this machine.

    Raises
    ------
    ArgumentError
        With both sizes.
    """
    needed = sum(sum(part.storages) for part in parts.values())
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if device.type == "cuda":
        limit = min(limit, torch.cuda.mem_get_info(device)[0])
    if needed > limit:
        rule = f"tensors of at most {size_text(limit)} to replay here"
        reject("storages", rule, size_text(needed))
