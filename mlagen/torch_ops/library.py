"""The library of torch ops, with their kernels, fake implementations and autograd.

An entry point has two ops: a functional one, and an out variant, ``..._out``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.families.common.no_backward import reject_backward
from mlagen.families.workspace import max_workspace_bytes
from mlagen.runtime.capture import is_capturing
from mlagen.runtime.semaphores import reserve_semaphores
from mlagen.torch_ops.schema import Argument, bind_args, schema_of

Shape = tuple[tuple[int, ...], torch.dtype]

NAMESPACE = "mlagen"

# The scratch of a captured graph may have another address than that of earlier calls; see
# mlagen.runtime.semaphores.
_SPARE_REGIONS = 64

_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class EntryOp:
    """The two ops of an entry point."""

    name: str
    arguments: tuple[Argument, ...]
    outputs: Callable[[dict[str, Any]], Sequence[Shape]]  # of the entry point's arguments
    compute: Callable[..., Any]  # of arguments, workspace and outputs

    has_lse: bool = False
    fills_lse: bool = False  # a given LSE is written, requested or not

    @property
    def functional(self) -> Any:
        """Return the op that allocates its outputs."""
        return getattr(torch.ops.mlagen, self.name).default

    @property
    def out_variant(self) -> Any:
        """Return the op that writes into given outputs."""
        return getattr(torch.ops.mlagen, f"{self.name}_out").default


def define(op: EntryOp) -> EntryOp:
    """Add both ops of an entry point to the library."""
    has_lse = op.has_lse
    schema = schema_of(op.arguments)
    results = "(Tensor, Tensor)" if has_lse else "Tensor"
    outputs = "Tensor(a!) out, Tensor(b!)? lse=None" if has_lse else "Tensor(a!) out"
    _library.define(f"{op.name}({schema}) -> {results}")
    _library.define(f"{op.name}_out({schema}, *, {outputs}) -> ()")

    def allocate(values: Sequence[Any], named: dict[str, Any]) -> Any:
        given = bind_args(op.arguments, values, named)
        tensor = _first_tensor(given)
        outs = [
            torch.empty(shape, dtype=dtype, device=tensor.device)
            for shape, dtype in op.outputs(given)
        ]
        return outs, given, tensor.device

    def run(*values: Any, **named: Any) -> Any:
        outs, given, device = allocate(values, named)
        op.compute(given, workspace_for(device), *outs)
        return tuple(outs) if has_lse else outs[0]

    def run_out(*values: Any, out: torch.Tensor, **named: Any) -> None:
        lse = (named.pop("lse", None),) if has_lse else ()
        given = bind_args(op.arguments, values, named)
        op.compute(given, workspace_for(out.device), out, *lse)

    def fake(*values: Any, **named: Any) -> Any:
        outs = allocate(values, named)[0]
        return tuple(outs) if has_lse else outs[0]

    def fake_out(*_values: Any, **_named: Any) -> None:
        return

    for device in ("CPU", "CUDA"):
        _library.impl(op.name, run, device)
        _library.impl(f"{op.name}_out", run_out, device)
    torch.library.register_fake(f"{NAMESPACE}::{op.name}", fake, lib=_library)
    torch.library.register_fake(f"{NAMESPACE}::{op.name}_out", fake_out, lib=_library)
    torch.library.register_autograd(
        f"{NAMESPACE}::{op.name}", _backward, setup_context=_save_inputs, lib=_library
    )
    return op


def workspace_for(device: torch.device) -> torch.Tensor:
    """Return scratch for any call, allocated on the current stream or in the graph's pool."""
    if device.type == "cuda" and not is_capturing(device):
        reserve_semaphores(device.index, _SPARE_REGIONS)
    return torch.empty(max_workspace_bytes(device), dtype=torch.uint8, device=device)


def _first_tensor(given: dict[str, Any]) -> torch.Tensor:
    return next(value for value in given.values() if isinstance(value, torch.Tensor))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch's
    ctx.save_for_backward(*_tensors_of(inputs))
    ctx.structure = tuple(
        len(value) if isinstance(value, (tuple, list)) else isinstance(value, torch.Tensor)
        for value in inputs
    )


def _tensors_of(inputs: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in inputs:
        if isinstance(value, (tuple, list)):
            yield from value
        elif isinstance(value, torch.Tensor):
            yield value


def _backward(ctx: Any, *given: Any) -> Any:
    """Return placeholder gradients; a compiler traces this before any backward runs."""
    saved = iter(ctx.saved_tensors)
    # A compiler moves nodes that do not depend on a gradient to the forward.
    grad = next(grad for grad in given if grad is not None)
    grads: list[Any] = []
    for entry in ctx.structure:
        if entry is True:
            grads.append(_gradient(next(saved), grad))
        elif entry is False:
            grads.append(None)
        else:
            grads.append([_gradient(next(saved), grad) for _ in range(entry)])
    return tuple(grads[: len(ctx.needs_input_grad)])  # without omitted defaults


def _gradient(tensor: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    if not tensor.dtype.is_floating_point:
        return None
    gradient: torch.Tensor = torch.ops.mlagen.no_backward(tensor, grad)
    return gradient


def _no_backward(_like: torch.Tensor, _grad: torch.Tensor) -> torch.Tensor:
    reject_backward()


_library.define("no_backward(Tensor like, Tensor grad) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("no_backward", _no_backward, _device)
torch.library.register_fake(
    f"{NAMESPACE}::no_backward", lambda like, _grad: torch.empty_like(like), lib=_library
)
