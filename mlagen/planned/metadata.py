"""The requests of a plan: checks of their metadata, private copies, and buffers of CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from mlagen.families.common.arguments import (
    INDEX_DTYPES,
    INT32_MAX,
    reject,
    require,
    require_contiguous,
    require_dims,
    require_dtype,
    require_shape,
    require_tensor,
)
from mlagen.families.common.device_checks import check_seq_lens, table_capacity
from mlagen.families.common.memory import require_memory
from mlagen.runtime.capture import is_capturing

_CPU = torch.device("cpu")
_OFFSETS = ("qo_indptr", "kv_indptr")
_TENSORS = (*_OFFSETS, "kv_indices", "kv_len_arr")


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """Query offsets, page ids and lengths: as the caller gave them, or as the runs read them."""

    qo_indptr: torch.Tensor | None = None  # [batch + 1]; None if requests have as many tokens
    kv_indptr: torch.Tensor | None = None  # [batch + 1]; None with block tables
    kv_indices: torch.Tensor  # flat, or block tables [batch, max_pages]
    kv_len_arr: torch.Tensor  # [batch]
    names: Mapping[str, str] = field(default_factory=dict)  # the caller's, where they differ

    @property
    def batch(self) -> int:
        """The number of requests."""
        return self.kv_len_arr.shape[0]

    @property
    def is_dense(self) -> bool:
        """Whether the page ids are block tables."""
        return self.kv_indptr is None

    def name_of(self, part: str) -> str:
        """Return the caller's name of a tensor."""
        return self.names.get(part, part)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by field; a compiler traces this."""
        given = {name: getattr(self, name) for name in _TENSORS}
        return {name: one for name, one in given.items() if isinstance(one, torch.Tensor)}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Requests:
        """Return the requests with some tensors replaced."""
        return replace(self, **tensors)  # type: ignore[arg-type]

    def mean_capacity(self, page_size: int) -> int:
        """Return the tokens of a request if all share the page ids equally."""
        ids = self.kv_indices.numel()
        return min(-(-ids * page_size // max(1, self.batch)), INT32_MAX)

    def capacity(self, page_size: int, *, is_bound: bool) -> int:
        """Return the tokens of a request, at most with ``is_bound``, or else as by the mean."""
        if not is_bound or self.is_dense:
            return self.mean_capacity(page_size)
        return min(self.kv_indices.numel() * page_size, INT32_MAX)


def checked(given: Requests, device: torch.device) -> Requests:
    """Return metadata whose offsets are cut to the batch, without reading contents."""
    for part, tensor in given.tensors().items():
        name = given.name_of(part)
        require_memory(require_tensor(tensor, name), name)
        require_dtype(tensor, name, INDEX_DTYPES)
        require_dims(tensor, name, (2,) if given.is_dense and part == "kv_indices" else (1,))
        if tensor.device not in (_CPU, device):
            reject(f"{name}.device", f"cpu or {device} (of float_workspace_buffer)", tensor.device)
    count, of = given.batch + 1, f"batch of {given.name_of('kv_len_arr')}"
    if given.is_dense:
        rule, rows = f"{given.batch} ({of})", given.kv_indices.shape[0]
        require(rows == given.batch, f"{given.name_of('kv_indices')}.shape[0]", rule, rows)
    offsets = {part: tensor for part, tensor in given.tensors().items() if part in _OFFSETS}
    for part, tensor in offsets.items():
        size = tensor.shape[0]
        rule = f"[{count}] or longer ({of} + 1)"
        require(size >= count, f"{given.name_of(part)}.shape", rule, [size])
    return given.with_tensors({part: tensor[:count] for part, tensor in offsets.items()})


def checked_buffers(buffers: Requests, device: torch.device) -> Requests:
    """Return the metadata buffers of a captured graph."""
    buffers = checked(buffers, device)
    for part, tensor in buffers.tensors().items():
        name = buffers.name_of(part)
        require(tensor.device == device, f"{name}.device", device, tensor.device)
        require_contiguous(tensor, name)
    return buffers


def lengths_on_host(given: Requests, page_size: int) -> torch.Tensor | None:
    """Return the lengths, or without them the capacities, as far as they are on the CPU."""
    capacity: int | torch.Tensor | None = None
    if given.kv_indptr is None:
        capacity = given.kv_indices.shape[1] * page_size
    elif given.kv_indptr.device.type == "cpu":
        capacity = table_capacity(
            given.kv_indptr.view(torch.int32),
            given.name_of("kv_indptr"),
            page_ids=given.kv_indices.shape[0],
            page_size=page_size,
        )
    if given.kv_len_arr.device.type == "cpu":
        lengths, name = given.kv_len_arr.view(torch.int32), given.name_of("kv_len_arr")
        return check_seq_lens(lengths, name, capacity=capacity, q_lens=None)
    return capacity if isinstance(capacity, torch.Tensor) else None


def max_kv_len_of(
    given: Requests, page_size: int, *, is_bound: bool, read_back: torch.Tensor | None
) -> int:
    """Return the longest length on the CPU, or of those to read back, or a request's capacity.

    Reading back waits for the device.
    """
    lengths = lengths_on_host(given, page_size)
    if lengths is None and read_back is not None and not is_capturing(read_back.device):
        lengths = read_back
    if lengths is None:
        return given.capacity(page_size, is_bound=is_bound)
    return min(int(lengths.max()), INT32_MAX) if len(lengths) else 0


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return 32-bit metadata on ``device`` as int32; the caller's tensor where it is there."""
    return _pageable(tensor).to(device, non_blocking=True)


def private_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an int32 copy of 32-bit metadata on ``device``, which the caller cannot change."""
    if tensor.device == device:
        return tensor.view(torch.int32).clone(memory_format=torch.contiguous_format)
    return on_device(tensor, device)


def copied(given: Requests, device: torch.device) -> Requests:
    """Return private copies on ``device``, without synchronization."""
    return given.with_tensors({k: private_copy(t, device) for k, t in given.tensors().items()})


def copy_into(buffers: Requests, given: Requests) -> None:
    """Copy metadata to the front of the buffers of a captured graph, without synchronization."""
    sources, targets = given.tensors(), buffers.tensors()
    for part, source in reversed(sources.items()):
        name, target = given.name_of(part), targets[part]
        if part == "kv_indices":
            rule, count = f"{target.shape[0]} (its buffer) or less", source.shape[0]
            require(count <= target.shape[0], f"{name}.shape[0]", rule, count)
        else:
            allowed = (tuple(target.shape),)
            require_shape(source, name, allowed, "its buffer of the constructor")
    for part, source in sources.items():
        front = targets[part].view(torch.int32)[: source.shape[0]]
        front.copy_(_pageable(source), non_blocking=True)


def _pageable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a source for an async copy: the caller may overwrite pinned memory before it runs."""
    tensor = tensor.view(torch.int32)
    if tensor.device.type == "cpu" and tensor.is_pinned():
        return torch.empty_like(tensor, pin_memory=False).copy_(tensor)
    return tensor
