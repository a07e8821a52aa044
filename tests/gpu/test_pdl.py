"""PDL with cooperative grids: CTAs start together, so none waits for an unscheduled CTA."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import mlagen
from mlagen.artifacts import Source
from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.toolchain import find_nvrtc
from tests.graph_replay import captured
from tests.kernels import SM_90A
from tests.problems.entry_points import compute
from tests.problems.mla import MlaCase
from tests.sm90_tiles import needs_sm90

driver = pytest.importorskip("cuda.bindings.driver")

pytestmark = [needs_sm90, pytest.mark.usefixtures("sm90")]

E4M3 = torch.float8_e4m3fn


# Two kernels with one CTA per SM. CTAs of the first end one after the other, and launch the
# second early; its CTAs record their start. Times are in nanoseconds.
_KERNELS = """
__device__ unsigned long long now() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

extern "C" __global__ void __launch_bounds__(32) first(unsigned long long*) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const unsigned long long end = now() + 1000 * (1 + blockIdx.x);
  while (now() < end) {
  }
}

extern "C" __global__ void __launch_bounds__(32) second(unsigned long long* begun) {
  if (threadIdx.x == 0) begun[blockIdx.x] = now();
  asm volatile("griddepcontrol.wait;" ::: "memory");  // else an SM has one after the other
}
"""


def start_spread(*, is_cooperative: bool) -> float:
    """Return the microseconds between the first and the last start of the second kernel's CTAs."""
    device = torch.cuda.get_device_properties(0)
    blocks = device.multi_processor_count // 2
    begun = torch.zeros(blocks, dtype=torch.int64, device="cuda")
    first, second = _loaded("first", "second")
    parameters = ((begun.data_ptr(),), (ctypes.c_void_p,))

    def launch_both() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        _launch(first, device.multi_processor_count, stream, parameters)
        _launch(second, blocks, stream, parameters, _attributes(is_cooperative))

    captured(launch_both).replay()
    torch.cuda.synchronize()
    return float(begun.max() - begun.min()) / 1e3


def _loaded(*names: str) -> list[Any]:
    code = compile_source(Source(text=_KERNELS, origins=()), SM_90A, find_nvrtc()).code
    status, module = driver.cuModuleLoadData(code)
    assert status == driver.CUresult.CUDA_SUCCESS
    functions = []
    for name in names:
        status, function = driver.cuModuleGetFunction(module, name.encode())
        assert status == driver.CUresult.CUDA_SUCCESS
        largest = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuFuncSetAttribute(function, largest, SM_90A.shared_bytes)
        assert status == driver.CUresult.CUDA_SUCCESS
        functions.append(function)
    return functions


def _attributes(is_cooperative: bool) -> list[Any]:
    """Return the PDL attribute, and the cooperative one if ``is_cooperative``."""
    ids = driver.CUlaunchAttributeID
    dependent = driver.CUlaunchAttribute()
    dependent.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    dependent.value.programmaticStreamSerializationAllowed = 1
    if not is_cooperative:
        return [dependent]
    cooperative = driver.CUlaunchAttribute()
    cooperative.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    cooperative.value.cooperative = 1
    return [dependent, cooperative]


def _launch(
    function: Any, blocks: int, stream: int, parameters: Any, attributes: Sequence[Any] = ()
) -> None:
    configuration = driver.CUlaunchConfig()
    configuration.gridDimX = blocks
    configuration.gridDimY = configuration.gridDimZ = 1
    configuration.blockDimX = 32
    configuration.blockDimY = configuration.blockDimZ = 1
    configuration.sharedMemBytes = SM_90A.shared_bytes
    configuration.hStream = stream
    configuration.attrs = list(attributes)
    configuration.numAttrs = len(attributes)
    (status,) = driver.cuLaunchKernelEx(configuration, function, parameters, 0)
    assert status == driver.CUresult.CUDA_SUCCESS


def test_ctas_of_a_cooperative_grid_start_together_with_pdl() -> None:
    """They start once all are co-resident; other CTAs start as SMs become idle, 1 us apart."""
    assert start_spread(is_cooperative=False) > 30
    assert start_spread(is_cooperative=True) < 10


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3], ids=str)
def test_a_call_reads_the_output_of_the_preceding_call(kv_dtype: torch.dtype) -> None:
    """In a graph each call's query is the output of the preceding one."""
    seqs, heads, pages, links = 12, 64, 16, 30  # pages per sequence
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    cache = torch.randn(seqs * pages, 64, 576, device="cuda").mul(4).to(kv_dtype)
    latent, rope = cache[..., :512], cache[..., 512:]
    scales: dict[str, Any] = {"ckv_scale": 1.0, "kpe_scale": 1.0} if kv_dtype is E4M3 else {}
    sizes = (seqs + 1, seqs + 1, seqs * pages, seqs)
    ends, first, ids, lens = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in sizes)
    wrapper = mlagen.mla.BatchMLAPagedAttentionWrapper(workspace, True, ends, first, ids, lens)
    starts = torch.arange(seqs + 1, dtype=torch.int32)
    wrapper.plan(
        starts,
        starts * pages,
        torch.randperm(seqs * pages, dtype=torch.int32),
        torch.full((seqs,), pages * 64 - 7, dtype=torch.int32),
        num_heads=heads,
        head_dim_ckv=512,
        head_dim_kpe=64,
        page_size=64,
        causal=True,
        sm_scale=192**-0.5,
        q_data_type=torch.bfloat16,
        kv_data_type=kv_dtype,
    )
    queries = torch.zeros(links + 1, seqs, heads, 512, dtype=torch.bfloat16, device="cuda")
    queries[0].normal_()
    query_rope = torch.randn(seqs, heads, 64, device="cuda").bfloat16()

    def link(index: int) -> None:
        wrapper.run(queries[index], query_rope, latent, rope, out=queries[index + 1], **scales)

    def chain() -> None:
        for index in range(links):
            link(index)

    for index in range(links):
        link(index)
        torch.cuda.synchronize()
    expected = queries.clone()
    graph = captured(chain)
    for _ in range(20):
        queries[1:].fill_(float("nan"))
        graph.replay()

        assert torch.equal(queries, expected)
    assert torch.isfinite(expected).all()
    assert not torch.equal(expected[1], expected[2])


def test_cooperative_calls_on_prioritized_streams_end() -> None:
    """Three streams would deadlock if CTAs of each held SMs that another needs."""
    cases = [
        MlaCase(name="few splits", seq_lens=(1024,) * 16, heads=128, dtype=E4M3),
        MlaCase(name="many splits", seq_lens=(3000,) * 5, heads=128, dtype=E4M3),
        MlaCase(name="16 bits", seq_lens=(1500,) * 9, heads=128),
    ]
    problems = [case.build("cuda") for case in cases]
    outs = [torch.empty_like(compute(problem)[0]) for problem in problems]
    decode = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla
    other = torch.ones(1 << 20, device="cuda")
    graphs = []
    for problem, out in zip(problems, outs, strict=True):

        def calls(arguments: dict[str, Any]) -> None:
            for index in range(16):
                decode(**arguments)
                if index % 3 == 2:
                    other.mul_(1)  # a kernel before which no call launches early

        graphs.append(captured(calls, {"arguments": problem.arguments(out=out)}))
    priorities = (0, -2, -5)
    streams = [torch.cuda.Stream(priority=each) for each in priorities]  # type: ignore[no-untyped-call]
    for _ in range(200):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()

    for problem, out in zip(problems, outs, strict=True):
        problem.check(out)
