"""Copies of the page metadata of a plan, without synchronization."""

from __future__ import annotations

import torch

from mlagen.families.common.arguments import INT32_MAX


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return 32-bit metadata on ``device`` as int32; the caller's tensor where it is there."""
    return _pageable(tensor).to(device, non_blocking=True)


def private_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an int32 copy of 32-bit metadata on ``device``, which the caller cannot change."""
    if tensor.device == device:
        return tensor.view(torch.int32).clone(memory_format=torch.contiguous_format)
    return on_device(tensor, device)


def copy_to_front(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy 32-bit metadata to the front of a buffer."""
    front = target.view(torch.int32)[: source.shape[0]]
    front.copy_(_pageable(source), non_blocking=True)


def mean_capacity(page_ids: int, page_size: int, batch: int) -> int:
    """Return the tokens of a request if all share the page ids equally."""
    return min(-(-page_ids * page_size // max(1, batch)), INT32_MAX)


def _pageable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a source for an async copy: the caller may overwrite pinned memory before it runs."""
    tensor = tensor.view(torch.int32)
    if tensor.device.type == "cpu" and tensor.is_pinned():
        return torch.empty_like(tensor, pin_memory=False).copy_(tensor)
    return tensor
