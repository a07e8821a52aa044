"""GPU time of a call, without host overhead, in three states of the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from statistics import median

import torch

# Minimum calls per graph, to amortize the launch of the graph.
_MIN_CALLS = 8

_WARM_UPS = 3
_REPLAYS = 20

# Replays until power decides the clock, and a pause after which the clock is that of an idle GPU.
_SUSTAINED_SECONDS = 0.5
_PAUSE_SECONDS = 0.1

# A projection of a decode layer: 128 tokens by 58 MB of weights, in rotation.
_PROJECTION = (128, 7168, 4096)
_PROJECTION_SETS = 4


class Replays:
    """Replays of a CUDA graph of calls with the indices ``0 .. sets - 1`` in rotation."""

    def __init__(self, call: Callable[[int], object], sets: int = 1) -> None:
        """Run one eager call per set, which compiles and loads the kernels, then capture."""
        for index in range(sets):
            call(index)
        torch.cuda.synchronize()
        self._call, self._sets = call, sets
        self._calls = sets * -(-_MIN_CALLS // sets)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}

    def median_us(self, mode: str = "fresh") -> float:
        """Return the median microseconds of a whole call; see :data:`~.suites.MODES`."""
        if mode == "model":
            return self._us_in_model()
        graph = self._graph("calls", lambda index: self._call(index % self._sets))
        if mode == "fresh":
            time.sleep(_PAUSE_SECONDS)
        else:
            _replay_for(graph, _SUSTAINED_SECONDS)
        for _ in range(_WARM_UPS):
            graph.replay()
        return median(_replay_ms(graph) for _ in range(_REPLAYS)) / self._calls * 1e3

    def _us_in_model(self) -> float:
        """Return the time that a call adds to a projection before it."""
        _project(0)  # allocates the weights before the capture

        def project_and_call(index: int) -> None:
            _project(index)
            self._call(index % self._sets)

        both, alone = self._graph("model", project_and_call), self._graph("projections", _project)
        for _ in range(_WARM_UPS):
            both.replay()
            alone.replay()
        pairs = [(_replay_ms(both), _replay_ms(alone)) for _ in range(_REPLAYS)]
        return median(ms - alone_ms for ms, alone_ms in pairs) / self._calls * 1e3

    def _graph(self, name: str, run: Callable[[int], object]) -> torch.cuda.CUDAGraph:
        if name not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for index in range(self._calls):
                    run(index)
            self._graphs[name] = graph
        return self._graphs[name]


@lru_cache(maxsize=1)
def _projection() -> tuple[torch.Tensor, list[torch.Tensor]]:
    rows, width, columns = _PROJECTION
    tokens = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    shape = (width, columns)
    weights = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(_PROJECTION_SETS)
    ]
    return tokens, weights


def _project(index: int) -> torch.Tensor:
    tokens, weights = _projection()
    return tokens @ weights[index % len(weights)]


def _replay_for(graph: torch.cuda.CUDAGraph, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
