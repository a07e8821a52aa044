"""Compiled code around the entry points, for every device, and AOTInductor."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mlagen.ops
from mlagen import UnsupportedError
from mlagen.families import workspace
from mlagen.runtime.device import DeviceFacts
from mlagen.torch_ops import traced as op_library
from tests import ops_cases
from tests.kernels import SM_90A
from tests.ops_cases import CALLS, MLA_SCALE, Tensors, gqa, mla, parts


@contextmanager
def compiling_once() -> Iterator[None]:
    """Let Inductor precompile no headers for later kernels, and try no vector extensions."""
    options: dict[str, object] = {
        "cpp_cache_precompile_headers": False,
        "aot_inductor.precompile_headers": False,
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "cpp.vec_isa_ok": False,
    }
    with torch._inductor.config.patch(options):
        yield


def wrapped(call: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function with model code around a call, exact in any evaluation order."""

    def forward(query: torch.Tensor) -> torch.Tensor:
        result = call(query * 2)
        outs = result if isinstance(result, tuple) else (result,)
        return torch.cat([out.float().mul(0.5).flatten() for out in outs])

    return forward


class Layer(torch.nn.Module):
    """A call with model code around it, whose batch may be dynamic."""

    def __init__(self, of: Tensors) -> None:
        super().__init__()
        self.of = of

    def forward(
        self, q: torch.Tensor, c: torch.Tensor, t: torch.Tensor, n: torch.Tensor
    ) -> torch.Tensor:
        """Return sums of the output rows of an MLA call."""
        out: Any = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
            q * 2, c, self.of.workspace, 128, 512, 64, t, n, 64, bmm1_scale=MLA_SCALE
        )
        rows: torch.Tensor = out.float().mul(0.5).sum(-1)
        return rows


def layer_inputs(of: Tensors, batch: int = 4) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a layer."""
    return of.query[:batch], of.cache, of.table[:batch], of.lengths[:batch]


class TestOps:
    """Semantics of compiled code, on the device of the fixture."""

    @pytest.fixture(autouse=True)
    def _fresh_compiler(self) -> None:
        with warnings.catch_warnings():  # torch warns about its own imports
            warnings.simplefilter("ignore", DeprecationWarning)
            torch._dynamo.reset()

    @pytest.fixture
    def of(self, device: str) -> Tensors:
        """Return the tensors of the calls."""
        return Tensors(device)

    @pytest.mark.parametrize("name", CALLS)
    def test_an_entry_point_is_part_of_one_graph(self, of: Tensors, name: str) -> None:
        """A call compiles without a graph break and gives the eager result."""
        forward = wrapped(lambda query: CALLS[name](of, query))

        compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")

        assert torch.equal(compiled(of.query), forward(of.query))

    def test_a_planned_run_is_part_of_one_graph(self, of: Tensors) -> None:
        """A run compiles with an LSE, into an output, and after another plan."""
        wrapper, out = ops_cases.planned(of), torch.empty_like(of.query[:, 0, :, :512])

        def run(query: torch.Tensor, out: torch.Tensor) -> Any:
            tensors = (*parts(query[:, 0]), *parts(of.cache))
            return wrapper.run(*tensors, out=out), *wrapper.run(*tensors, return_lse=True)

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            expected = [part.clone() for part in run(of.query, torch.empty_like(out))]
            got = compiled(of.query, out)

            assert all(map(torch.equal, got, expected))
            assert torch.equal(out, expected[0])
            of.lengths[3] -= 5
            fresh = ops_cases.planned(of)
            wrapper._plan = fresh._plan
        of.lengths[3] += 10

    def test_a_run_that_its_plan_declares_is_part_of_one_graph(self, of: Tensors) -> None:
        """One tensor for query and cache, sinks, factors and an FP8 output compile as they run."""
        out = torch.zeros(4, 16, 512, device=of.device).to(torch.float8_e4m3fn)
        wrapper = ops_cases.declared(of)

        def run(query: torch.Tensor, out: torch.Tensor) -> Any:
            factors = {"bmm1_scale": MLA_SCALE, "bmm2_scale": 2.0, "o_scale": 0.01}
            tensors: Any = {"query": query[:, 0], "kv_cache": of.cache, "sinks": of.sinks}
            return wrapper.run(**tensors, **factors, out=out, return_lse=True)

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        expected = [part.float() for part in run(of.query, out)]
        got = compiled(of.query, out.clone())

        assert all(map(torch.equal, (part.float() for part in got), expected))
        assert expected[0].any()

    @pytest.mark.parametrize("entry", ["planned", "planless"])
    def test_an_output_with_gaps_is_written_in_one_graph(self, of: Tensors, entry: str) -> None:
        """A run compiles into any strides that it takes, and leaves the gaps as they are."""
        wide = torch.zeros(4, 16, 576, device=of.device)
        wide = wide.bfloat16() if entry == "planned" else wide.to(torch.float8_e4m3fn)
        wrapper, expected = ops_cases.planned(of), wide.clone()

        def run(query: torch.Tensor, wide: torch.Tensor) -> Any:
            if entry == "planless":
                return ops_cases.planless(of, query, out=wide[..., :512], o_scale=0.01)
            return wrapper.run(*parts(query[:, 0]), *parts(of.cache), out=wide[..., :512])

        result = run(of.query, expected)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(of.query, wide)

        assert torch.equal(compiled.float(), result.float())
        assert torch.equal(wide.float(), expected.float())
        assert wide.float().any()

    def test_a_planned_gqa_run_is_part_of_one_graph(self, of: Tensors) -> None:
        """A run of batch decode compiles with an LSE, and into an output."""
        wrapper, caches = ops_cases.planned_gqa(of), (of.keys, of.values)

        def run(query: torch.Tensor, out: torch.Tensor) -> Any:
            return wrapper.run(query, caches, out=out), *wrapper.run(query, caches, return_lse=True)

        query, out = of.gqa_query, torch.empty_like(of.gqa_query)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        expected = [part.clone() for part in run(query, torch.empty_like(out))]

        assert all(map(torch.equal, compiled(query, out), expected))
        assert torch.equal(out, expected[0])

    def test_a_growing_length_recompiles_once(self, of: Tensors) -> None:
        """max_seq_len is symbolic, so that decoding does not recompile at every step."""
        compiles = 0

        def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
            nonlocal compiles
            compiles += 1
            return graph.forward

        def call(query: torch.Tensor, longest: int) -> Any:
            return mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
                *(query, of.cache, of.workspace, 128, 512, 64, of.table, of.lengths, longest)
            )

        compiled = torch.compile(call, fullgraph=True, backend=backend)
        for longest in range(64, 70):
            compiled(of.query, longest)

        assert compiles <= 2

    @pytest.mark.parametrize("strict", [True, False])
    def test_export_with_a_dynamic_batch(self, of: Tensors, strict: bool) -> None:
        """An exported program accepts other batch sizes."""
        batch = torch.export.Dim("batch", min=2, max=256)
        shapes = {"q": {0: batch}, "c": None, "t": {0: batch}, "n": {0: batch}}
        layer = Layer(of)

        program = torch.export.export(layer, layer_inputs(of), dynamic_shapes=shapes, strict=strict)

        for size in (2, 4):
            inputs = layer_inputs(of, size)
            assert torch.equal(program.module()(*inputs), layer(*inputs))

    @pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
    def test_make_fx_records_the_op(self, of: Tensors, mode: Any) -> None:
        """A traced graph contains the op and gives the eager result."""
        layer, inputs = Layer(of), layer_inputs(of)

        graph = make_fx(layer, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)

        assert "mlagen.trtllm_batch_decode_with_kv_cache_mla" in graph.code
        assert torch.equal(graph(*inputs), layer(*inputs))

    def test_fake_tensors_give_fake_outputs(self, of: Tensors) -> None:
        """Calls and runs under FakeTensorMode give shapes and dtypes, for one tensor and parts."""
        wrapper, usual = ops_cases.declared(of), ops_cases.planned(of)
        factors: Any = {"bmm1_scale": 1.0, "bmm2_scale": 2.0, "o_scale": 0.5, "sinks": of.sinks}
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            query, cache = mode.from_tensor(of.query), mode.from_tensor(of.cache)
            target = torch.empty(4, 16, 512, dtype=torch.float8_e4m3fn, device=of.device)
            given: Any = {"query": query[:, 0], "kv_cache": cache, "out": target}
            pair: Any = wrapper.run(**given, return_lse=True, **factors)
            out: Any = usual.run(query=parts(query[:, 0]), kv_cache=parts(cache))
            joined, lse = mla(of, query, return_lse=True)
            of_parts = mla(of, parts(query))

        assert pair[0] is target
        made = [(tuple(each.shape), each.dtype) for each in (pair[1], out, joined, lse, of_parts)]
        lses, joint = ((4, 16), torch.float32), ((4, 1, 16, 512), torch.bfloat16)
        assert made == [lses, ((4, 16, 512), torch.bfloat16), joint, lses, joint]

    @pytest.mark.parametrize("writes", [False, True])
    def test_ops_pass_opcheck(self, of: Tensors, writes: bool) -> None:
        """torch.library.opcheck passes: schema, fake kernel, dynamic shapes."""
        name = "trtllm_batch_decode_with_kv_cache_mla"
        call: tuple[Any, ...] = (of.query, of.cache, 128, 512, 64, of.table, of.lengths, 64)
        named: dict[str, Any] = {"return_lse": True, "bmm1_scale_tensor": of.scale}
        if writes:
            named["out"], named["lse"] = mla(of, of.query, return_lse=True)
        torch.library.opcheck(mlagen.ops.op(name, writes=writes), call, named)

        name = "xqa_batch_decode_with_kv_cache"
        call = (of.gqa_query, [of.keys, of.values], of.table, of.lengths, 64)
        named = {"out": torch.empty_like(of.gqa_query)} if writes else {}
        torch.library.opcheck(mlagen.ops.op(name, writes=writes), call, named)

    @pytest.mark.parametrize("is_compiled", [False, True])
    @pytest.mark.parametrize("into_out", [False, True])
    def test_forward_works_and_backward_is_rejected(
        self, of: Tensors, is_compiled: bool, into_out: bool
    ) -> None:
        """Inputs that require grad give the same output; backward raises a one-line error."""

        def call(query: torch.Tensor, gqa_query: torch.Tensor) -> Any:
            outs: tuple[torch.Tensor | None, ...] = (None, None)
            if into_out:
                outs = (query.detach()[..., :512].contiguous(), gqa_query.detach().clone())
            first = mla(of, query, out=outs[0])
            return first, gqa(of, gqa_query, out=outs[1])

        expected = call(of.query, of.gqa_query)
        inputs = [t.clone().requires_grad_() for t in (of.query, of.gqa_query)]
        run = torch.compile(call, fullgraph=True, backend="aot_eager") if is_compiled else call

        for out, right in zip(run(*inputs), expected, strict=True):
            assert out.requires_grad
            assert torch.equal(out, right)
            with pytest.raises(UnsupportedError, match="backward: not implemented"):
                out.float().sum().backward(retain_graph=True)

    def test_invalid_arguments_in_compiled_code_are_rejected(self, of: Tensors) -> None:
        """The op raises the error of the entry point."""
        of.made["table"] = of.table.float()
        compiled = torch.compile(lambda query: mla(of, query), fullgraph=True, backend="eager")

        with pytest.raises(mlagen.ArgumentError, match=r"^block_tables.dtype: expected"):
            compiled(of.query)

    @pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")
    @pytest.mark.filterwarnings("ignore")  # Inductor warns about itself
    def test_inductor_compiles_the_code_around_a_call(self, of: Tensors) -> None:
        """With Inductor and a dynamic batch the results equal the eager ones."""
        layer = Layer(of)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)

        for size in (4, 2, 3):
            inputs = layer_inputs(of, size)
            with compiling_once():
                torch.testing.assert_close(compiled(*inputs), layer(*inputs))


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")
@pytest.mark.filterwarnings("ignore")  # of Inductor, about itself
def test_a_package_of_aotinductor_runs(tmp_path: Path) -> None:
    """A layer compiled ahead of time equals the eager one."""
    layer = Layer(of := Tensors("cpu"))
    program = torch.export.export(layer, inputs := layer_inputs(of))

    with compiling_once():
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "layer.pt2")
        )

    run = torch._inductor.aoti_load_package(path)
    assert torch.equal(run(*inputs), layer(*inputs))


@pytest.mark.parametrize("is_capturing", [False, True])
def test_semaphores_are_reserved_before_a_capture(
    is_capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls outside a capture reserve spare semaphores, and calls in one allocate none."""
    facts = DeviceFacts(index=1, name="", major=9, minor=0, sm_count=132, memory_bytes=0)
    reserved: list[tuple[int, int]] = []
    monkeypatch.setattr(op_library, "is_capturing", lambda _: is_capturing)
    monkeypatch.setattr(workspace, "device_facts", lambda _: facts)
    monkeypatch.setattr(workspace, "arch_of_device", lambda _: SM_90A)
    monkeypatch.setattr(op_library, "reserve_semaphores", lambda *given: reserved.append(given))
    monkeypatch.setattr(torch, "empty", lambda size, **_: size)

    size = op_library.workspace_for(torch.device("cuda", 1))

    assert reserved == ([] if is_capturing else [(1, op_library._SPARE_WORKSPACES)])
    assert size >= 132 * 513 * 1024
