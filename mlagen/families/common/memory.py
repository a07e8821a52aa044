"""Checks that tensors are dense and in memory at their ``data_ptr``, as the kernels require.

Other tensors have shape, strides, dtype and device too: a compiler's fake tensors, views of
:func:`torch.func.vmap`, sparse and nested tensors, wrapper subclasses. Torch's dispatch keys
distinguish all of them from plain tensors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from mlagen.values import reject

_dispatch_keys = torch._C._dispatch_keys  # noqa: SLF001

_DEVICES = ("cpu", "cuda")
_UNINITIALIZED = (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)
_RULE = "a dense tensor in memory"

# Descriptions for messages by substring of a dispatch key; the first match counts.
_KINDS = {
    "FuncTorchBatched": "a batched tensor of vmap",
    "FuncTorchGradWrapper": "a tensor of a torch.func transform",
    "Functionalize": "a functional tensor",
    "Sparse": "a sparse tensor",
    "Mkldnn": "an MKLDNN tensor",
    "Quantized": "a quantized tensor",
    "ZeroTensor": "a zero tensor without memory",
    "Negative": "a view with the negative bit; resolve_neg() gives its elements",
    "Conjugate": "a view with the conjugate bit; resolve_conj() gives its elements",
}

_accepted_keys: set[int] = set()  # dispatch keys of plain tensors that passed the check


def require_memory(tensor: object, argument: str) -> None:
    """Reject a tensor whose elements are not in memory at its address; other values pass."""
    if isinstance(tensor, torch.Tensor) and not _has_passed(tensor):
        # A subclass may intercept these queries.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            _require_memory(tensor, argument)


def _has_passed(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has memory, and its dispatch keys passed before: the fast path."""
    is_plain = tensor.__class__ is torch.Tensor
    return (
        is_plain and _dispatch_keys(tensor).raw_repr() in _accepted_keys and tensor.data_ptr() != 0
    )


def _require_memory(tensor: torch.Tensor, argument: str) -> None:
    require_shaped(tensor, argument)
    # The device checks reject other devices.
    if tensor.device.type not in _DEVICES:
        return
    if _dispatch_keys(tensor).raw_repr() not in _plain_keys(tensor.device.type):
        reject(argument, _RULE, _kind_of(tensor))
    _accepted_keys.add(_dispatch_keys(tensor).raw_repr())
    if tensor.numel() and not tensor.data_ptr():
        reject(argument, _RULE, "a tensor without storage")


def require_shaped(tensor: torch.Tensor, argument: str) -> None:
    """Reject a tensor without a shape; a compiler's tensors pass."""
    if tensor.is_nested:
        reject(argument, _RULE, "a nested tensor")
    if isinstance(tensor, _UNINITIALIZED):
        reject(argument, _RULE, f"an uninitialized {type(tensor).__name__}")


def require_plain(tensor: torch.Tensor, argument: str) -> None:
    """Reject a tensor without readable shape or views; cheap for plain tensors."""
    if tensor.__class__ is not torch.Tensor or tensor.is_nested:
        require_memory(tensor, argument)


def require_writable(tensor: object, argument: str) -> None:
    """Reject an output that torch does not write in place."""
    if not isinstance(tensor, torch.Tensor):
        return
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        rule = "a tensor that may be written outside inference_mode"
        reject(argument, rule, "one made under inference_mode")
    if tensor.requires_grad and torch.is_grad_enabled():
        if tensor.is_leaf:
            reject(argument, "a tensor that may be written in place", "a leaf that requires grad")
        if tensor._base is not None and tensor._base.is_leaf:  # noqa: SLF001 - there is no other way
            rule = "a tensor that may be written in place"
            reject(argument, rule, "a view of a leaf that requires grad")
    if torch._debug_has_internal_overlap(tensor) == 1:  # noqa: SLF001 - as copy_ does
        reject(argument, "elements that do not overlap", f"strides {tensor.stride()}")


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape share memory.

    Views that interleave do not; of tensors with other strides, the address ranges are compared.
    """
    if not one.numel():
        return False
    distance = other.data_ptr() - one.data_ptr()
    if _axes(one) == _axes(other):
        return _reaches(distance, _axes(one))
    first = one if distance >= 0 else other
    extent = first.element_size() + sum(step * (n - 1) for step, n in _axes(first))
    return abs(distance) < extent


def _axes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return stride in bytes and size of the axes that have a stride, the longest stride first."""
    size = tensor.element_size()
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return sorted(((step * size, n) for step, n in pairs if n > 1 and step), reverse=True)


def _reaches(distance: int, axes: list[tuple[int, int]]) -> bool:
    """Whether steps along the axes, the longest first, add up to a distance."""
    if not axes:
        return distance == 0
    (stride, size), *inner = axes
    steps = distance // stride
    return any(abs(n) < size and _reaches(distance - n * stride, inner) for n in (steps, steps + 1))


def check_memory(args: Any) -> None:
    """Reject the first tensor of a call that kernels cannot read, or cannot write as an output."""
    values = args._asdict()
    for field, value in values.items():
        if isinstance(value, torch.Tensor) and not _has_passed(value):
            require_memory(value, _name_of(field, values))
    for field in ("out", "lse"):
        require_writable(values.get(field), _name_of(field, values))


def _name_of(field: str, values: dict[str, Any]) -> str:
    # A tensor that holds K and V is in the field of the keys.
    if field == "key_cache" and values["value_cache"] is None:
        field = "kv_cache"
    if field == "key_scales" and values["value_scales"] is None:
        field = "kv_scales"
    name: str = getattr(values["names"], field, field)
    return name


@cache
def _plain_keys(device_type: str) -> frozenset[int]:
    """Return the dispatch keys of plain tensors on a device, with and without inference mode."""
    with torch.inference_mode(mode=False):
        plain = torch.empty(0, dtype=torch.uint8, device=device_type)
    with torch.inference_mode():
        inference = torch.empty(0, dtype=torch.uint8, device=device_type)
    return frozenset(_dispatch_keys(tensor).raw_repr() for tensor in (plain, inference))


def _kind_of(tensor: torch.Tensor) -> str:
    keys = str(_dispatch_keys(tensor))
    if "Python" in keys:
        return f"a {type(tensor).__name__}, which is a subclass with __torch_dispatch__"
    for key, kind in _KINDS.items():
        if key in keys:
            return kind
    return f"a tensor with the dispatch keys {keys}"
