"""GPU time of a call, without host overhead, in several states of the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from statistics import median

import torch
from torch.nn.functional import rms_norm, silu

# Minimum calls per graph, to amortize the launch of the graph.
_MIN_CALLS = 8

_WARM_UPS = 3
_REPLAYS = 20

# Replays until power decides the clock, and a pause after which the clock is that of an idle GPU.
_SUSTAINED_SECONDS = 0.5
_PAUSE_SECONDS = 0.1

# A projection of a decode layer: 128 tokens by 58 MB of weights, in rotation.
_TOKENS = 128
_PROJECTION = (7168, 4096)
_PROJECTION_SETS = 4

# The GEMMs of a decode layer: into query and latent KV, into the heads, out of them, of the router,
# and of a dense MLP.
_HIDDEN, _QUERY, _LATENT, _HEADS, _EXPERTS, _INTERMEDIATE = 7168, 1536, 576, 4096, 256, 2048
_TOP_EXPERTS = 8
_GEMMS = {
    "query_latent": (_HIDDEN, _QUERY + _LATENT),
    "heads": (_QUERY, _HEADS),
    "out": (_HEADS, _HIDDEN),
    "router": (_HIDDEN, _EXPERTS),
    "gate_up": (_HIDDEN, 2 * _INTERMEDIATE),
    "down": (_INTERMEDIATE, _HIDDEN),
}


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
        if mode in _BEFORE:
            return self._us_behind(mode)
        graph = self._graph("calls", lambda index: self._call(index % self._sets))
        if mode == "fresh":
            time.sleep(_PAUSE_SECONDS)
        else:
            _replay_for(graph, _SUSTAINED_SECONDS)
        for _ in range(_WARM_UPS):
            graph.replay()
        return median(_replay_ms(graph) for _ in range(_REPLAYS)) / self._calls * 1e3

    def _us_behind(self, mode: str) -> float:
        """Return the time that a call adds to the kernels before it."""
        before = _BEFORE[mode]
        before(0)  # allocates the weights before the capture

        def run_both(index: int) -> None:
            before(index)
            self._call(index % self._sets)

        both, alone = self._graph(mode, run_both), self._graph(f"before {mode}", before)
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
    return _random(_TOKENS, _PROJECTION[0]), [
        _random(*_PROJECTION) for _ in range(_PROJECTION_SETS)
    ]


def _project(index: int) -> object:
    tokens, weights = _projection()
    return tokens @ weights[index % len(weights)]


@lru_cache(maxsize=1)
def _layer() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    weights = {name: _random(*shape) * shape[0] ** -0.5 for name, shape in _GEMMS.items()}
    return _random(_TOKENS, _HIDDEN), _random(_TOKENS, _HEADS), weights


def _run_layer(_index: int) -> object:
    """Run what a decode layer has from one attention call to the next, in kernels of torch."""
    hidden, attended, weights = _layer()
    hidden = hidden + attended @ weights["out"]
    normed = rms_norm(hidden, (_HIDDEN,))
    scores, _ = (normed @ weights["router"]).sigmoid().topk(_TOP_EXPERTS)
    gate, up = (normed @ weights["gate_up"]).chunk(2, dim=-1)
    hidden = hidden + (silu(gate) * up) @ weights["down"] * scores.sum(dim=-1, keepdim=True)
    both = rms_norm(hidden, (_HIDDEN,)) @ weights["query_latent"]
    query, latent = torch.split_with_sizes(both, (_QUERY, _LATENT), dim=-1)
    return rms_norm(query, (_QUERY,)) @ weights["heads"], rms_norm(latent, (_LATENT,))


_BEFORE: dict[str, Callable[[int], object]] = {"model": _project, "layer": _run_layer}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


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
