"""Compiled code around the entry points, and tensors without memory, on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests.memory_semantics import MemorySemantics
from tests.ops_cases import Tensors, gqa
from tests.ops_semantics import Layer, OpsSemantics


class TestCompiled(OpsSemantics):
    """Every promise about compiled code."""

    device = "cuda"

    @pytest.mark.filterwarnings("ignore")  # of Inductor, about itself
    def test_cuda_graphs_of_the_compiler_hold_the_calls(self, of: Tensors) -> None:
        """Graphs are not skipped, and each replay follows its inputs."""
        layer, (query, *others) = Layer(of), self.layer_inputs(of)
        layer(query, *others)  # loads the kernel
        compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
        counters.clear()

        for step in range(6):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            got = compiled(query + step, *others).clone()
            torch.testing.assert_close(got, layer(query + step, *others))

        assert counters["inductor"].get("cudagraph_skips", 0) == 0

    @pytest.mark.filterwarnings("ignore")  # of Inductor, about itself
    def test_graphs_of_many_layers_hold_the_calls(self, of: Tensors) -> None:
        """Calls of two kinds, one behind the other, into outputs of the graph."""

        def layers(query: torch.Tensor, gqa_query: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                gqa_query = gqa(of, gqa_query * 0.5, out=torch.empty_like(gqa_query))
            rows: torch.Tensor = Layer(of)(query, of.cache, of.table, of.lengths)
            return rows + gqa_query.float().sum()

        layers(of.query, of.gqa_query)
        compiled = torch.compile(layers, fullgraph=True, mode="reduce-overhead")
        counters.clear()

        for step in range(4):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            inputs = (of.query + step, of.gqa_query - step)
            torch.testing.assert_close(compiled(*inputs).clone(), layers(*inputs))

        assert counters["inductor"].get("cudagraph_skips", 0) == 0

    @pytest.mark.filterwarnings("ignore")  # of Inductor, about itself
    def test_a_graph_around_compiled_code_is_replayed(self, of: Tensors) -> None:
        """On a stream that no call has seen, scratch is taken from the pool of the graph."""
        layer, inputs = Layer(of), [tensor.clone() for tensor in self.layer_inputs(of)]
        compiled = torch.compile(layer, fullgraph=True)
        compiled(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = compiled(*inputs)

        inputs[0].add_(1)
        graph.replay()
        torch.cuda.synchronize()

        torch.testing.assert_close(got, layer(*inputs))

    @pytest.mark.filterwarnings("ignore")  # of Inductor, about itself
    def test_a_package_of_aotinductor_runs(self, of: Tensors, tmp_path: Path) -> None:
        """A layer that is compiled ahead of time gives what it gives without a compiler."""
        layer, inputs = Layer(of), self.layer_inputs(of)
        program = torch.export.export(layer, inputs)

        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "layer.pt2")
        )

        run = torch._inductor.aoti_load_package(path)
        torch.testing.assert_close(run(*inputs), layer(*inputs))


class TestMemory(MemorySemantics):
    """Every promise about what has no memory: nothing is launched, and the context lives on."""

    device = "cuda"

    @pytest.fixture(autouse=True)
    def _no_error_is_left(self) -> object:
        yield
        torch.cuda.synchronize()
