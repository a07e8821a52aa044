"""GPU time of a call, without host overhead."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

# Minimum calls per graph, to amortize the launch of the graph.
_MIN_CALLS = 8

_WARM_UPS = 3
_REPLAYS = 20


def median_us(call: Callable[[int], object], sets: int = 1) -> float:
    """Return the median microseconds of a whole call, over replays of a CUDA graph.

    The graph holds calls with the indices ``0 .. sets - 1`` in rotation. One eager call per set
    before the capture compiles and loads the kernels.
    """
    for index in range(sets):
        call(index)
    torch.cuda.synchronize()
    calls = sets * -(-_MIN_CALLS // sets)
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
