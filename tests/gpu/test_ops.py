"""Compiled code around the entry points, and tensors without memory, on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests import test_memory, test_ops
from tests.ops_cases import Tensors, gqa
from tests.test_ops import Layer, layer_inputs

_ROOT = Path(__file__).resolve().parents[2]


class TestCompiled(test_ops.TestOps):
    """Shared tests of compiled code, on a GPU."""

    @pytest.mark.filterwarnings("ignore")  # Inductor warns about itself
    def test_cuda_graphs_of_the_compiler_include_the_calls(self, of: Tensors) -> None:
        """CUDA graphs are not skipped, and each replay follows its inputs."""
        layer, (query, *others) = Layer(of), layer_inputs(of)
        layer(query, *others)  # loads the kernel
        compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
        counters.clear()

        for step in range(6):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            got = compiled(query + step, *others).clone()
            torch.testing.assert_close(got, layer(query + step, *others))

        assert counters["inductor"].get("cudagraph_skips", 0) == 0

    @pytest.mark.filterwarnings("ignore")  # Inductor warns about itself
    def test_graphs_of_many_layers_include_the_calls(self, of: Tensors) -> None:
        """Two kinds of calls in sequence write into outputs of the graph."""

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

    @pytest.mark.filterwarnings("ignore")  # Inductor warns about itself
    def test_a_graph_around_compiled_code_is_replayed(self, of: Tensors) -> None:
        """On a new stream the workspace comes from the graph's memory pool."""
        layer, inputs = Layer(of), [tensor.clone() for tensor in layer_inputs(of)]
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

    def test_an_aotinductor_package_runs(self) -> None:
        """A layer compiled ahead of time gives the eager result."""
        if (status := _packaged("Doubled(), (torch.ones(8, device='cuda'),)")) != 0:
            pytest.skip(f"torch loads no package here, not even without mlagen: exit {status}")

        assert _packaged("Layer(of), (of.query[:4], of.cache, of.table[:4], of.lengths[:4])") == 0


# A package that torch cannot load ends its process.
_PACKAGED = """
import sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch
from tests.ops_cases import Tensors
from tests.test_ops import Layer
class Doubled(torch.nn.Module):
    def forward(self, x):
        return x * 2
of = Tensors("cuda")
module, inputs = {module_and_inputs}
with tempfile.TemporaryDirectory() as folder:
    program = torch.export.export(module, inputs)
    path = torch._inductor.aoti_compile_and_package(program, package_path=folder + "/layer.pt2")
    run = torch._inductor.aoti_load_package(path)
    torch.testing.assert_close(run(*inputs), module(*inputs))
"""


def _packaged(module_and_inputs: str) -> int:
    """Return the exit status of a process that packages a module and runs the package."""
    program = _PACKAGED.format(module_and_inputs=module_and_inputs)
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=_ROOT, env=environment, check=False
    ).returncode


class TestMemory(test_memory.TestMemory):
    """Shared tests of tensors without memory: nothing is launched, and the context stays valid."""

    @pytest.fixture(autouse=True)
    def _no_error_is_left(self) -> object:
        yield
        torch.cuda.synchronize()
