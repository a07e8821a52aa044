"""Gradients, of which there are none: forward works, and a backward says so."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from mlagen.api.arguments import reject
from mlagen.errors import UnsupportedError

_MESSAGE = "backward: not implemented for decode kernels, expected no gradient to be asked for"


def reject_backward() -> NoReturn:
    """Raise the error of a backward.

    Raises
    ------
    UnsupportedError
        Always.
    """
    raise UnsupportedError(_MESSAGE)


def wants_grad(inputs: tuple[object, ...]) -> bool:
    """Whether torch records what is done with the tensors among these."""
    if not torch.is_grad_enabled():
        return False
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as in mlagen.api.memory
        return any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)


def tensors_of(inputs: tuple[object, ...]) -> tuple[torch.Tensor, ...]:
    """Return the tensors that may have gradients."""
    return tuple(
        value
        for value in inputs
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    )


def recorded(output: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return an output that was made for ``tensors``, of which one requires grad."""
    result: torch.Tensor = _Made.apply(output, *tensors)  # type: ignore[no-untyped-call]
    return result


def record_write(output: torch.Tensor, argument: str, tensors: tuple[torch.Tensor, ...]) -> None:
    """Have a given output depend on ``tensors``, before it is written.

    Raises
    ------
    ArgumentError
        If torch does not let it be written in place.
    """
    try:
        others = (tensor for tensor in tensors if tensor is not output)
        _Given.apply(output, *others)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        reject(argument, "a tensor that may be written in place", reason)


class _Made(torch.autograd.Function):
    """An output that was made."""

    @staticmethod
    def forward(_ctx: Any, output: torch.Tensor, *_tensors: torch.Tensor) -> torch.Tensor:
        return output.detach()

    @staticmethod
    def backward(_ctx: Any, *_grads: torch.Tensor) -> NoReturn:
        reject_backward()


class _Given(torch.autograd.Function):
    """An output that was given."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *_tensors: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(_ctx: Any, *_grads: torch.Tensor) -> NoReturn:
        reject_backward()
