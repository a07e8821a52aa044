"""Log of calls, ``MLAGEN_LOG=api``: one line each, in the logger ``mlagen.api``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from mlagen.observe.document import MAX_DEPTH, parts_of

_logger = logging.getLogger("mlagen.api")

_MAX_TEXT = 80
_MAX_PARTS = 8


def log_call(
    name: str,
    arguments: Mapping[str, object],
    *,
    result: object,
    kernels: Sequence[str],
    error: BaseException | None,
    is_captured: bool,
) -> None:
    """Log a call that returned ``result`` or raised ``error``."""
    given = ", ".join(f"{key}={value_text(value)}" for key, value in arguments.items())
    if error is not None:
        message = str(error).partition("\n")[0]
        end = f" raises {type(error).__name__}: {message}"
    else:
        end = f" -> {value_text(result)}"
    if kernels:
        end += f": {', '.join(kernels)}"
    captured = ", captured" if is_captured else ""
    _logger.info("%s(%s)%s%s", name, given, end, captured)


def value_text(value: object, depth: int = 0) -> str:
    """Return a value on one line: of a tensor its metadata."""
    if isinstance(value, torch.Tensor):
        return _tensor_text(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    parts = parts_of(value)
    if parts is None or depth > MAX_DEPTH:
        text = " ".join(repr(value).split())
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    texts = [(key, value_text(part, depth + 1)) for key, part in parts[:_MAX_PARTS]]
    if isinstance(value, (tuple, list)):
        more = ["..."] if len(parts) > _MAX_PARTS else []
        return f"({', '.join([text for _, text in texts] + more)})"
    return f"{type(value).__name__}({', '.join(f'{key}={text}' for key, text in texts)})"


def _tensor_text(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    text = f"{dtype}{list(tensor.shape)}"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"{text} {'nested' if tensor.is_nested else tensor.layout} {tensor.device}"
    if not tensor.is_contiguous():
        text += f" strides {list(tensor.stride())}"
    return f"{text} {tensor.device}"
