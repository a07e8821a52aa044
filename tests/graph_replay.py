"""CUDA graph capture of calls, and replay with exchanged tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(call: Callable[..., object], arguments: dict[str, Any]) -> torch.cuda.CUDAGraph:
    """Return a graph of one call, after the call that compiles and loads its kernels."""
    call(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(**arguments)
    return graph


def cloned(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with cloned tensors, also those in lists."""
    return {name: _clone(value) for name, value in arguments.items()}


def exchange(static: dict[str, Any], given: dict[str, Any], *names: str) -> None:
    """Copy the content of the tensors ``names``, of equal shapes, and overwrite the workspace."""
    for name in names:
        _copy(static[name], given[name])
    static["workspace_buffer"].fill_(0xFF)


def _clone(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [_clone(part) for part in value] if isinstance(value, (list, tuple)) else value


def _copy(static: object, given: object) -> None:
    if isinstance(static, torch.Tensor) and isinstance(given, torch.Tensor):
        assert static.shape == given.shape
        static.copy_(given)
    elif isinstance(static, (list, tuple)) and isinstance(given, (list, tuple)):
        for one, other in zip(static, given, strict=True):
            _copy(one, other)
