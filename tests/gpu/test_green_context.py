"""Calls in a green context of 16 SMs, and in the whole GPU before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mlagen.families.dispatch import GQA
from mlagen.mla.flare import run_mla
from mlagen.runtime import partition
from mlagen.runtime.device import checked
from tests.problems.entry_points import decode, decode_gqa
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaProblem, mla_case
from tests.sm90_tiles import launchers_of, needs_sm90, sm90_kernels

driver = pytest.importorskip("cuda.bindings.driver")

pytestmark = needs_sm90

_SMS = 16
CASES = {
    "bf16, few rows": mla_case("bf16", seq_lens=(9000, 70, 0), heads=16),
    "bf16, many rows": mla_case("bf16", seq_lens=(9000, 70, 0), heads=128),
    "e4m3": mla_case("e4m3", seq_lens=(9000, 70), heads=128, with_sinks=True),
    "fp8_ds_mla": mla_case("bf16 over fp8_ds_mla", seq_lens=(9000, 70), heads=64),
    "sparse": mla_case("bf16 over fp8_ds_mla", seq_lens=(9000,), top_k=2048, q_len=4),
    "sparse, 16 bits": mla_case("bf16", seq_lens=(9000,), top_k=2048, q_len=4, heads=64),
    "ragged": mla_case("bf16", seq_lens=(9000, 70), q_lens=(3, 1), heads=40),
}


@pytest.fixture(params=["auto", "sm90"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make calls use the default kernel, or an sm90 kernel."""
    if request.param == "auto":
        yield
        return
    with sm90_kernels(monkeypatch):
        yield


@pytest.fixture(scope="module")
def stream() -> torch.cuda.Stream:
    """Return a stream of a green context of 16 SMs that lives as long as the process."""
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    torch.zeros(1, device="cuda")
    device = checked(driver.cuDeviceGet(torch.cuda.current_device()), "cuDeviceGet")
    whole = checked(driver.cuDeviceGetDevResource(device, kind), "cuDeviceGetDevResource")
    split = driver.cuDevSmResourceSplitByCount(1, whole, 0, _SMS)
    parts, _, _ = checked(split, "cuDevSmResourceSplitByCount")
    description = checked(driver.cuDevResourceGenerateDesc(parts[:1], 1), "Desc")
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    green = checked(driver.cuGreenCtxCreate(description, device, flags), "cuGreenCtxCreate")
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    made = checked(driver.cuGreenCtxStreamCreate(green, flags, 0), "cuGreenCtxStreamCreate")
    return torch.cuda.ExternalStream(int(made))  # type: ignore[no-untyped-call]


def inside(stream: torch.cuda.Stream, call: Callable[[], Any]) -> Any:
    """Return the result of a call on a stream, synchronized with the work before and after."""
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        result = call()
    stream.synchronize()
    return result


def compute(problem: MlaProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE."""
    out, lse = run_mla(*problem.inputs(return_lse=True))
    assert lse is not None
    return out, lse


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_mla(case: Any, stream: torch.cuda.Stream) -> None:
    """Results are right in the whole GPU, in the green context and in the whole GPU again."""
    problem = case.build("cuda")
    before = compute(problem)

    for _ in range(3):
        problem.check(*inside(stream, lambda: compute(problem)))

    after = compute(problem)
    problem.check(*before)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


@pytest.mark.usefixtures("_kernel")
def test_cached_launches(stream: torch.cuda.Stream) -> None:
    """A loop over the same tensors continues inside the green context, and outside again."""
    problem = CASES["bf16, many rows"].build("cuda")
    arguments = problem.arguments()
    workspace, out = arguments["workspace_buffer"], torch.empty_like(problem.query[..., :512])

    def call() -> None:
        out.fill_(float("nan"))
        decode(problem, workspace_buffer=workspace, out=out)

    for is_inside in (False, False, True, True, True, False, False, True):
        if is_inside:
            inside(stream, call)
        else:
            call()
        problem.check(out)


@pytest.mark.usefixtures("_kernel")
def test_a_graph(stream: torch.cuda.Stream) -> None:
    """A graph captured on the green context's stream replays there."""
    problem = CASES["e4m3"].build("cuda")
    out, lse = inside(stream, lambda: compute(problem))
    inputs = problem.inputs(return_lse=True, out=out, lse=lse)
    inside(stream, lambda: run_mla(*inputs))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(3):
            run_mla(*inputs)
    for tensor in (out, lse):
        tensor.fill_(float("nan"))

    inside(stream, graph.replay)

    problem.check(out, lse)


@pytest.mark.parametrize("kv", ["16-bit", "e4m3"])
@pytest.mark.parametrize("group", [4, 8])
def test_gqa(
    group: int, kv: str, stream: torch.cuda.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GQA grids, which the driver would accept, are planned for the SMs of their context."""
    monkeypatch.setattr(partition, "partitioned_gpus", set())
    monkeypatch.setattr(partition, "_whole_streams", set())
    GQA.clear()
    problem = GqaCase(seq_lens=(9000, 70, 0), group=group, page_size=64, kv=kv).build("cuda")
    before = decode_gqa(problem)

    for _ in range(3):
        problem.check(inside(stream, lambda: decode_gqa(problem)))

    problem.check(before)
    assert torch.equal(before, decode_gqa(problem))
    sms = inside(stream, lambda: partition.partition_of(problem.query))
    in_context, whole = sorted(launcher.plan.num_ctas for launcher in launchers_of(GQA))
    assert in_context <= sms < whole


def test_a_graph_of_gqa(stream: torch.cuda.Stream) -> None:
    """A graph captured on the green context's stream, after one call there, replays there."""
    problem = GqaCase(seq_lens=(9000, 70), group=8, q_len=4, page_size=64).build("cuda")
    workspace, out = problem.arguments()["workspace_buffer"], torch.empty_like(problem.query)
    inside(stream, lambda: decode_gqa(problem, workspace_buffer=workspace, out=out))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(3):
            decode_gqa(problem, workspace_buffer=workspace, out=out)
    out.fill_(float("nan"))

    inside(stream, graph.replay)

    problem.check(out)


@pytest.mark.usefixtures("_kernel")
def test_the_green_contexts_of_torch() -> None:
    """Kernels first loaded in a current green context outlive it."""
    contexts = pytest.importorskip("torch.cuda.green_contexts")
    if not getattr(contexts, "SUPPORTED", True):
        pytest.skip("needs a torch that was built with green contexts")
    case = mla_case("fp16", seq_lens=(9000, 70), heads=128, page_size=32)
    problem = case.build("cuda")
    green = contexts.GreenContext.create(num_sms=_SMS, device_id=0)
    torch.cuda.synchronize()
    green.set_context()
    try:
        results = [compute(problem) for _ in range(3)]
        torch.cuda.synchronize()
    finally:
        green.pop_context()
    del green

    for out, lse in (*results, compute(problem)):
        problem.check(out, lse)
