"""CUDA graph capture of calls, and replay with exchanged tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.problems.entry_points import EntryPoint
from tests.problems.problem import Problem

# What a call writes, or may write.
_WRITTEN = {"workspace_buffer", "semaphores", "out", "output", "lse"}


def captured(
    call: Callable[..., object], arguments: dict[str, Any] | None = None
) -> torch.cuda.CUDAGraph:
    """Return a graph of one call, after the call that compiles and loads its kernels."""
    arguments = arguments or {}
    call(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(**arguments)
    return graph


def exchange(static: dict[str, Any], given: dict[str, Any]) -> None:
    """Copy the content of all tensors that a call reads, and overwrite the workspace."""
    for name in static.keys() & given.keys() - _WRITTEN:
        _copy(static[name], given[name])
    if "workspace_buffer" in static:
        static["workspace_buffer"].fill_(0xFF)


def check_replays(entry: EntryPoint, problems: Sequence[Problem], **changes: Any) -> None:
    """Fail unless replays of a call follow all content of its tensors.

    The tensors of all problems have equal shapes.
    """
    own = entry.arguments(problems[0])
    static = {name: _clone(value) for name, value in own.items()}
    if "k_cache" in own and own["k_cache"] is own["v_cache"]:
        static["v_cache"] = static["k_cache"]
    out = static[entry.names["out"]] = entry.new_out(problems[0])
    lse = None
    if "lse" in entry.names:
        shape = problems[0].query.shape[:-1]
        lse = static["lse"] = torch.empty(shape, device=problems[0].device).flatten(0, -2)
        if entry.name != "xqa":
            static["return_lse"] = True
    graph = captured(entry.function, static | changes)

    for problem in (*problems[1:], problems[0]):
        exchange(static, entry.arguments(problem))
        for written in (out, *([lse] if lse is not None else [])):
            written.copy_(torch.full_like(written, 7.0, dtype=torch.float32))
        graph.replay()

        problem.check(out, lse)


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
