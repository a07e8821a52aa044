"""Whether tensors are what kernels can work on: elements in memory, at the address they name.

A tensor may have shape, strides, dtype and device without that: fake tensors of a compiler, views
of :func:`torch.func.vmap`, sparse and nested tensors, subclasses that hold other tensors. Torch's
dispatch keys tell all of them from plain ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch

from mlagen.api.arguments import reject

_dispatch_keys = torch._C._dispatch_keys  # noqa: SLF001

_DEVICES = ("cpu", "cuda")
_RULE = "a dense tensor in memory"

# What a dispatch key is called in a message; the first that is found in its name.
_KINDS = {
    "FuncTorchBatched": "a batched tensor of vmap",
    "FuncTorchGradWrapper": "a tensor of a torch.func transform",
    "Functionalize": "a functional tensor",
    "Nested": "a nested tensor",
    "Sparse": "a sparse tensor",
    "Mkldnn": "an MKLDNN tensor",
    "Quantized": "a quantized tensor",
    "ZeroTensor": "a zero tensor without memory",
    "Negative": "a view with the negative bit; resolve_neg() gives its elements",
    "Conjugate": "a view with the conjugate bit; resolve_conj() gives its elements",
}

_passed: set[int] = set()  # dispatch keys of plain tensors that were looked at


class Inputs(Protocol):
    """The arguments of a call, with what the caller knows them by."""

    @property
    def names(self) -> Any:
        """Names by field."""

    def _asdict(self) -> dict[str, Any]: ...


def require_memory(tensor: object, argument: str) -> None:
    """Reject a tensor whose elements are not in memory at its address; no other value is rejected.

    Raises
    ------
    ArgumentError
        If it is one; the message says of what kind.
    """
    if tensor.__class__ is torch.Tensor:  # in one step, if it is like one that passed
        plain: torch.Tensor = tensor
        if _dispatch_keys(plain).raw_repr() in _passed and plain.data_ptr():
            return
    if isinstance(tensor, torch.Tensor):
        # A subclass may watch or forbid what is asked of it.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            _require_memory(tensor, argument)


def _require_memory(tensor: torch.Tensor, argument: str) -> None:
    # Other devices are rejected by the check that all tensors are on one, and that it is known.
    if tensor.device.type not in _DEVICES:
        return
    if torch.nn.parameter.is_lazy(tensor):
        reject(argument, _RULE, f"an uninitialized {type(tensor).__name__}")
    if _dispatch_keys(tensor).raw_repr() not in _plain_keys(tensor.device.type):
        reject(argument, _RULE, _kind_of(tensor))
    _passed.add(_dispatch_keys(tensor).raw_repr())
    if tensor.numel() and not tensor.data_ptr():
        reject(argument, _RULE, "a tensor without storage")


def require_plain(tensor: torch.Tensor, argument: str) -> None:
    """Reject what has no shape that can be read, or no views, at little cost for plain tensors.

    Raises
    ------
    ArgumentError
        If it is such a tensor without memory.
    """
    if tensor.__class__ is not torch.Tensor or tensor.is_nested:
        require_memory(tensor, argument)


def require_writable(tensor: object, argument: str) -> None:
    """Reject a tensor that torch would not write to in place.

    Raises
    ------
    ArgumentError
        If it is one.
    """
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
    if torch._debug_has_internal_overlap(tensor) == 1:  # noqa: SLF001 - what copy_ itself asks
        reject(argument, "elements that do not overlap", f"strides {tensor.stride()}")


def check_memory(inputs: Inputs) -> None:
    """Reject the first tensor of a call that no kernel can read, or write where it is an output.

    Raises
    ------
    ArgumentError
        If there is one; the message names it.
    """
    given = inputs._asdict()
    for field, value in given.items():
        if isinstance(value, torch.Tensor):
            require_memory(value, _name_of(field, given))
    for field in ("out", "lse"):
        require_writable(given.get(field), _name_of(field, given))


def _name_of(field: str, given: dict[str, Any]) -> str:
    # One tensor of keys and values is in the field of the keys.
    if field == "key_cache" and given["value_cache"] is None:
        field = "kv_cache"
    if field == "key_scales" and given["value_scales"] is None:
        field = "kv_scales"
    name: str = getattr(given["names"], field, field)
    return name


@cache
def _plain_keys(device_type: str) -> frozenset[int]:
    """Return the dispatch keys that plain tensors of a device have."""
    with torch.inference_mode(mode=False):
        plain = torch.empty(0, device=device_type)
    with torch.inference_mode():
        of_inference = torch.empty(0, device=device_type)
    return frozenset(_dispatch_keys(each).raw_repr() for each in (plain, of_inference))


def _kind_of(tensor: torch.Tensor) -> str:
    keys = str(_dispatch_keys(tensor))
    if "Python" in keys:
        return f"a {type(tensor).__name__}, which is a subclass with __torch_dispatch__"
    for key, kind in _KINDS.items():
        if key in keys:
            return kind
    return f"a tensor with the dispatch keys {keys}"
