"""Entry points as torch ops, under a compiler or a tracing mode.

Tracing records torch ops only, and cannot follow an entry point's use of addresses. So an entry
point checks first whether it is traced, and calls its op then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mlagen.families.common.memory import require_memory
from mlagen.torch_ops.library import EntryOp, Shape, define
from mlagen.torch_ops.schema import arguments_of, flatten_args

__all__ = ["Op", "as_op", "define_ops", "is_compiling", "is_traced", "require_eager_memory"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# True while Dynamo traces. Every other trace, such as that of torch.export, has a dispatch mode.
is_compiling = torch.compiler.is_dynamo_compiling

# Non-zero under a dispatch mode: fake tensors, torch.export, make_fx or AOTAutograd. The public
# checks cost more.
is_traced = torch._C._len_torch_dispatch_stack  # noqa: SLF001

_ops: dict[str, EntryOp] = {}
_parameters: dict[str, tuple[str, ...]] = {}


def require_eager_memory(**tensors: object) -> None:
    """Reject arguments that are not in memory, before torch ops use them; tracing uses none.

    Raises
    ------
    ArgumentError
        If there is one; the message names it and its kind.
    """
    if not (is_compiling() or is_traced()):
        for name, tensor in tensors.items():
            require_memory(tensor, name)


@dataclass(frozen=True, kw_only=True)
class Op:
    """What the ops of an entry point need to know."""

    outputs: Callable[[dict[str, Any]], Sequence[Shape]]  # of the entry point's arguments
    has_lse: bool = False
    fills_lse: bool = False  # a given LSE is written, requested or not
    constants: Callable[[torch.Tensor], dict[str, Any]] | None = None  # arguments, of the workspace


def traceable(op: Op) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that defines the ops of a function, and returns it unchanged."""

    def decorate(function: FunctionT) -> FunctionT:
        define_ops(function, op)
        return function

    return decorate


def define_ops(function: Callable[..., Any], op: Op) -> None:
    """Define the ops of an entry point, by its name."""
    name = function.__name__
    parameters = tuple(inspect.signature(function).parameters)
    out_name = "output" if "output" in parameters else "out"

    def compute(
        given: dict[str, Any],
        workspace: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        others = {} if op.constants is None else op.constants(workspace)
        if lse is not None and given.get("return_lse", True):
            others["lse"] = lse
        if "workspace_buffer" in parameters:
            others["workspace_buffer"] = workspace
        function(**given, **others, **{out_name: out})

    arguments = arguments_of(function)
    _ops[name] = define(EntryOp(name, arguments, op.outputs, compute, op.has_lse, op.fills_lse))
    _parameters[name] = parameters


def as_op(name: str, *values: Any) -> Any:
    """Return the result of an entry point, computed by its op; a compiler traces this."""
    op, given = _ops[name], dict(zip(_parameters[name], values, strict=True))
    out, lse = given.get("out"), given.get("lse")
    if "output" in given:
        out = given["output"]
    # An entry point without the flag writes the LSE that it is given.
    is_lse_returned = op.has_lse and given.get("return_lse", lse is not None)
    has_lse = is_lse_returned or (op.fills_lse and lse is not None)
    if "return_lse" in given:
        given["return_lse"] = has_lse
    if out is None or _wants_grad(values):
        results = op.functional(*flatten_args(op.arguments, given))
        out = _copied_if_given(out, results[0] if op.has_lse else results)
        if has_lse:
            shape, _ = op.outputs(given)[1]
            lse = _copied_if_given(lse, results[1].view(shape))
    elif op.has_lse:
        if has_lse and lse is None:
            shape, dtype = op.outputs(given)[1]
            lse = torch.empty(shape, dtype=dtype, device=out.device)
        op.out_variant(*flatten_args(op.arguments, given), out=out, lse=lse if has_lse else None)
    else:
        op.out_variant(*flatten_args(op.arguments, given), out=out)
    return (out, lse) if is_lse_returned else out


def _copied_if_given(given: torch.Tensor | None, result: Any) -> torch.Tensor:
    tensor: torch.Tensor = result
    return tensor if given is None else given.copy_(tensor.view(given.shape))


def _wants_grad(values: Sequence[Any]) -> bool:
    if not torch.is_grad_enabled():
        return False
    for value in values:
        parts = value if isinstance(value, (tuple, list)) else (value,)
        for part in parts:
            if isinstance(part, torch.Tensor) and part.requires_grad:
                return True
    return False
