"""Entry points as torch ops, under a compiler or a tracing mode.

Tracing records torch ops only, and cannot follow an entry point's use of addresses. So an entry
point checks first whether it is traced, and calls its op then: a functional one, or an out variant,
``..._out``, whose implementations call the entry point again.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from mlagen.families.common.memory import require_memory
from mlagen.families.common.no_backward import reject_backward, wants_grad
from mlagen.families.workspace import max_workspace_bytes
from mlagen.runtime.capture import is_capturing
from mlagen.runtime.semaphores import reserve_semaphores
from mlagen.torch_ops.schema import Argument, arguments_of, bind_args, flatten_args, schema_of

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Shape = tuple[tuple[int, ...], torch.dtype]

# True while Dynamo traces. Every other trace, such as that of torch.export, has a dispatch mode.
is_compiling = torch.compiler.is_dynamo_compiling

# Non-zero under a dispatch mode: fake tensors, torch.export, make_fx or AOTAutograd. The public
# checks cost more.
is_traced = torch._C._len_torch_dispatch_stack  # noqa: SLF001

# The scratch of a captured graph may have another address than that of earlier calls; see
# mlagen.runtime.semaphores.
_SPARE_WORKSPACES = 64

# torch.library.custom_op derives no schema of a scale or a pair, and checks at every call what is
# known of these ops: that no output is an input.
_library: Any = torch.library.Library("mlagen", "DEF")  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class Op:
    """What the ops of an entry point need to know."""

    output: Callable[[dict[str, Any]], Shape]  # of the entry point's arguments
    has_lse: bool = False
    is_lse_flat: bool = False  # its query tokens are one axis
    lse_flag: str = "return_lse"  # the parameter that requests it
    fills_lse: bool = False  # a given LSE is written, requested or not
    constants: Callable[[torch.Tensor], dict[str, Any]] | None = None  # arguments, of the workspace

    def outputs(self, given: dict[str, Any]) -> list[Shape]:
        """Return the output of a call, and its LSE if it has one, empty unless requested."""
        output = self.output(given)
        if not self.has_lse:
            return [output]
        *tokens, heads = output[0][:-1]
        if self.is_lse_flat and len(tokens) > 1:
            tokens = [tokens[0] * tokens[1]]
        rows = (*tokens, heads) if given.get(self.lse_flag, True) else (0,)
        return [output, (rows, torch.float32)]


# By the name of the entry point: its op, its parameters, and those of them that the op has.
_ops: dict[str, tuple[Op, tuple[str, ...], tuple[Argument, ...]]] = {}


def require_eager_memory(**tensors: object) -> None:
    """Reject arguments that are not in memory, before torch ops use them; tracing uses none."""
    if not (is_compiling() or is_traced()):
        for name, tensor in tensors.items():
            require_memory(tensor, name)


def traceable(op: Op) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that defines the ops of a function, and returns it unchanged."""

    def decorate(function: FunctionT) -> FunctionT:
        define_ops(function, op)
        return function

    return decorate


def define_ops(function: Callable[..., Any], op: Op) -> None:
    """Define both ops of an entry point, by its name."""
    name, arguments = function.__name__, arguments_of(function)
    parameters = tuple(inspect.signature(function).parameters)
    _ops[name] = op, parameters, arguments

    def compute(given: dict[str, Any], out: torch.Tensor, lse: torch.Tensor | None) -> None:
        workspace = workspace_for(out.device)
        others = {} if op.constants is None else op.constants(workspace)
        if lse is not None and given.get(op.lse_flag, True):
            others["lse"] = lse
        if "workspace_buffer" in parameters:
            others["workspace_buffer"] = workspace
        function(**given, **others, **{"output" if "output" in parameters else "out": out})

    def fake(*values: Any, **named: Any) -> Any:
        given = bind_args(arguments, values, named)
        device = next(value.device for value in given.values() if isinstance(value, torch.Tensor))
        outs = [
            torch.empty(shape, dtype=dtype, device=device) for shape, dtype in op.outputs(given)
        ]
        return tuple(outs) if op.has_lse else outs[0]

    def run(*values: Any, **named: Any) -> Any:
        outs = fake(*values, **named)
        out, lse = outs if op.has_lse else (outs, None)
        compute(bind_args(arguments, values, named), out, lse)
        return outs

    def run_out(
        *values: Any, out: torch.Tensor, lse: torch.Tensor | None = None, **named: Any
    ) -> None:
        compute(bind_args(arguments, values, named), out, lse)

    outputs = "Tensor(a!) out, Tensor(b!)? lse=None" if op.has_lse else "Tensor(a!) out"
    schema, result = schema_of(arguments), "(Tensor, Tensor)" if op.has_lse else "Tensor"
    _define(f"{name}({schema}) -> {result}", run, fake)
    _define(f"{name}_out({schema}, *, {outputs}) -> ()", run_out, lambda *_, **__: None)
    torch.library.register_autograd(
        f"mlagen::{name}", _backward, setup_context=_save_inputs, lib=_library
    )


def writer(
    written: Sequence[str] = (), fake: Callable[..., torch.Tensor] | None = None
) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator of a function that writes into arguments, or returns a tensor.

    It defines the op of the function, which a traced call becomes; the tensors of any other call
    are in memory. ``fake`` returns a tensor like the function's.
    """

    def decorate(function: FunctionT) -> FunctionT:
        name, arguments = function.__name__, arguments_of(function)
        parameters = tuple(inspect.signature(function).parameters)
        schema = schema_of(arguments)
        for alias, argument in zip("abc", written, strict=False):
            schema = re.sub(rf"Tensor(\??) {argument}\b", rf"Tensor({alias}!)\1 {argument}", schema)

        def implementation(compute: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *values, **named: compute(**bind_args(arguments, values, named))

        def run(*values: Any, **named: Any) -> Any:
            require_eager_memory(**dict(zip(parameters, values, strict=False)), **named)
            return function(*values, **named)

        _define(
            f"{name}({schema}) -> {'()' if fake is None else 'Tensor'}",
            implementation(run),
            implementation(fake or (lambda **_: None)),
        )

        @wraps(function)
        def entry(*values: Any, **named: Any) -> Any:
            if is_compiling() or is_traced():
                return getattr(torch.ops.mlagen, name).default(*values, **named)
            return run(*values, **named)

        return cast("FunctionT", entry)

    return decorate


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.define(schema)
    name = schema.partition("(")[0]
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"mlagen::{name}", fake, lib=_library)


def workspace_for(device: torch.device) -> torch.Tensor:
    """Return scratch for any call, allocated on the current stream or in the graph's pool."""
    if device.type == "cuda" and not is_capturing(device):
        reserve_semaphores(device.index, _SPARE_WORKSPACES)
    return torch.empty(max_workspace_bytes(device), dtype=torch.uint8, device=device)


def as_op(name: str, *values: Any) -> Any:
    """Return the result of an entry point, computed by its op; a compiler traces this."""
    op, parameters, arguments = _ops[name]
    given = dict(zip(parameters, values, strict=True))
    out, lse = given.get("output", given.get("out")), given.get("lse")
    # An entry point without the flag writes the LSE that it is given.
    is_lse_returned = op.has_lse and given.get(op.lse_flag, lse is not None)
    has_lse = is_lse_returned or (op.fills_lse and lse is not None)
    if op.lse_flag in given:
        given[op.lse_flag] = has_lse
    flat = flatten_args(arguments, given)
    if out is None or wants_grad(_tensors_of(flat)):
        results = getattr(torch.ops.mlagen, name).default(*flat)
        out = _copied_if_given(out, results[0] if op.has_lse else results)
        if has_lse:
            shape, _ = op.outputs(given)[1]
            lse = _copied_if_given(lse, results[1].view(shape))
    else:
        into = getattr(torch.ops.mlagen, f"{name}_out").default
        if has_lse and lse is None:
            shape, dtype = op.outputs(given)[1]
            lse = torch.empty(shape, dtype=dtype, device=out.device)
        if op.has_lse:
            into(*flat, out=out, lse=lse if has_lse else None)
        else:
            into(*flat, out=out)
    return (out, lse) if is_lse_returned else out


def _copied_if_given(given: torch.Tensor | None, result: Any) -> torch.Tensor:
    tensor: torch.Tensor = result
    return tensor if given is None else given.copy_(tensor.view(given.shape))


def _tensors_of(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from value
        elif isinstance(value, torch.Tensor):
            yield value


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch's
    ctx.save_for_backward(*_tensors_of(inputs))
    ctx.structure = tuple(
        len(value) if isinstance(value, (tuple, list)) else isinstance(value, torch.Tensor)
        for value in inputs
    )


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


_define(
    "no_backward(Tensor like, Tensor grad) -> Tensor",
    lambda _like, _grad: reject_backward(),
    lambda like, _grad: torch.empty_like(like),
)
