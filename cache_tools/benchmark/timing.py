"""How long a call takes on the GPU, without what the host does for it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

# Calls of a graph at the least, so that its own launch does not count.
_CALLS = 8

_WARM_UPS = 3
_REPLAYS = 20


def median_us(call: Callable[[int], object], sets: int = 1) -> float:
    """Return the median microseconds of a whole call, over replays of a CUDA graph.

    The graph holds calls with the numbers ``0 .. sets - 1`` in turn. The first of them are made
    before the capture, which lets a call compile and load what it needs.
    """
    for index in range(sets):
        call(index)
    torch.cuda.synchronize()
    calls = sets * -(-_CALLS // sets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index % sets)
    for _ in range(_WARM_UPS):
        graph.replay()
    return median(_replay_ms(graph) for _ in range(_REPLAYS)) / calls * 1e3


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
