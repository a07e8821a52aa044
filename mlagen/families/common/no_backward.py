"""Autograd support: the forward runs, and a backward raises, as there are no gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import reject

_MESSAGE = "backward: not implemented for decode kernels, expected no gradient to be requested"


def reject_backward() -> NoReturn:
    """Raise the error for a backward."""
    raise UnsupportedError(_MESSAGE)


def wants_grad(inputs: Iterable[object]) -> bool:
    """Whether autograd records ops on the tensors among ``inputs``."""
    if not torch.is_grad_enabled():
        return False
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as in mlagen.families.common.memory
        return any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)


def tensors_of(inputs: Iterable[object]) -> tuple[torch.Tensor, ...]:
    """Return the floating-point tensors, which may have gradients."""
    return tuple(
        value
        for value in inputs
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    )


def record_output(output: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return a new output as a function of ``tensors``, of which one requires grad."""
    result: torch.Tensor = _NewOutput.apply(output, *tensors)  # type: ignore[no-untyped-call]
    return result


def record_write(output: torch.Tensor, argument: str, tensors: tuple[torch.Tensor, ...]) -> None:
    """Record an in-place write of ``output`` that depends on ``tensors``, before the write."""
    try:
        others = (tensor for tensor in tensors if tensor is not output)
        _InPlaceOutput.apply(output, *others)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        reject(argument, "a tensor that may be written in place", reason)


class _NewOutput(torch.autograd.Function):
    """A newly allocated output."""

    @staticmethod
    def forward(_ctx: Any, output: torch.Tensor, *_tensors: torch.Tensor) -> torch.Tensor:
        return output.detach()

    @staticmethod
    def backward(_ctx: Any, *_grads: torch.Tensor) -> NoReturn:
        reject_backward()


class _InPlaceOutput(torch.autograd.Function):
    """An output that the caller gave."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *_tensors: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(_ctx: Any, *_grads: torch.Tensor) -> NoReturn:
        reject_backward()
