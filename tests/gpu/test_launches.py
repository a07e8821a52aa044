"""Launches of every entry point: what they read, write, check and wait for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mlagen
from mlagen.errors import ArgumentError, CaptureError
from mlagen.settings import current_settings
from tests.device_sync import no_device_sync
from tests.problems.batch_mla import SINGLE, SOME, plan_arguments, run, wrapper_of
from tests.problems.entry_points import ENTRY_POINTS, EntryPoint
from tests.problems.flare import flare_case
from tests.problems.gqa import KINDS as GQA_KINDS
from tests.problems.masks import MASKS
from tests.problems.mla import KINDS, MlaCase
from tests.problems.problem import Problem


def over(*names: str) -> Callable[[Any], Any]:
    """Run a test over entry points."""
    return pytest.mark.parametrize("entry", [ENTRY_POINTS[name] for name in names], ids=names)


both = over("trtllm", "xqa_batch")


def needed_bytes(entry: EntryPoint, problem: Problem) -> int:
    """Return the workspace size of a call, from the error of a call without workspace."""
    with pytest.raises(ArgumentError) as caught:
        entry.run(problem, workspace_buffer=torch.empty(0, dtype=torch.uint8, device="cuda"))
    rule = r"workspace_buffer: expected (\d+) bytes or more for this call, got 0 bytes"
    found = re.fullmatch(rule, str(caught.value))
    assert found is not None, caught.value
    return int(found[1])


GUARDED: list[tuple[str, dict[str, Any]]] = [
    ("trtllm", {"heads": 24, "with_sinks": True}),
    ("trtllm", {"heads": 24, "q_lens": (1, 3)}),
    ("trtllm", {"heads": 24, "top_k": 2048}),
    ("trtllm", {"heads": 24, "values": "other pages"}),
    *(("trtllm", {"heads": 24, **KINDS[kind]}) for kind in ("e4m3", "bf16 over fp8_ds_mla")),
    *(("xqa_batch", {"q_len": 3, "sink": 3.0, **facts}) for facts in GQA_KINDS.values()),
]


@pytest.mark.parametrize(("name", "facts"), GUARDED, ids=str)
def test_nothing_outside_the_result_is_written(name: str, facts: dict[str, Any]) -> None:
    """Guard bands around output, LSE and workspace keep their bytes."""
    entry = ENTRY_POINTS[name]
    problem = entry.build("cuda", seq_lens=(3000, 17), **facts)
    needed, band = needed_bytes(entry, problem), 4096
    workspace = torch.full((band + needed + band,), 0x5A, dtype=torch.uint8, device="cuda")
    tokens, heads = sum(problem.case.lens), problem.query.shape[-2]
    out = torch.full((2 + tokens + 2, heads, problem.out_shape[-1]), 7.0, device="cuda")
    out = out.to(problem.out_dtype)
    lse = torch.full((2 + tokens + 2, heads), 7.0, device="cuda")
    with_lse = {"lse": lse[2:-2], "return_lse": True} if "lse" in entry.names else {}

    entry.call(problem, workspace_buffer=workspace[band:-band], out=out[2:-2], **with_lse)

    problem.check(out[2:-2], lse[2:-2] if with_lse else None)
    assert needed > 0
    assert (workspace[:band] == 0x5A).all()
    assert (workspace[-band:] == 0x5A).all()
    assert all((part[[0, 1, -2, -1]].float() == 7.0).all() for part in (out.float(), lse))


def test_inputs_are_not_written() -> None:
    """Caches, tables, lengths, masks and sinks keep their bytes."""
    entry = ENTRY_POINTS["xqa_batch"]
    problem = entry.build("cuda", seq_lens=(3000, 17), q_len=3, sink=3.0, mask="random")
    arguments = entry.arguments(problem)
    names = ("query", "block_tables", "seq_lens", "sinks", "mask")
    tensors = [arguments[name] for name in names] + list(arguments["kv_cache"])
    before = [tensor.view(torch.uint8).clone() for tensor in tensors]

    entry.function(**arguments)

    assert all(torch.equal(t.view(torch.uint8), b) for t, b in zip(tensors, before, strict=True))


@both
def test_the_same_plan_gives_the_same_bits(entry: EntryPoint) -> None:
    """A repeated call gives a bitwise equal result."""
    problem = entry.build("cuda", seq_lens=(5000, 77, 900), q_len=2)
    first = entry.run(problem)

    assert all(torch.equal(first, entry.run(problem)) for _ in range(50))


@both
def test_offsets_beyond_32_bits(entry: EntryPoint) -> None:
    """Pages beyond 2^32 bytes of the cache are read correctly."""
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of free GPU memory")
    problem = entry.build("cuda", seq_lens=(300,), page_size=64)
    arguments = entry.arguments(problem)
    parts = arguments["kv_cache"]
    is_one = isinstance(parts, torch.Tensor)
    row_bytes = math.prod(problem.keys.shape[1:]) * problem.keys.element_size()
    pages, used = (2**32 + 2**28) // row_bytes, 5
    high = torch.arange(pages - used, pages, device="cuda")
    caches = []
    for part in (parts,) if is_one else parts:
        cache = torch.full((pages, *part.shape[1:]), math.nan, dtype=part.dtype, device="cuda")
        cache[high] = part[problem.block_tables[0, :used].long()]
        caches.append(cache)
    tables = problem.block_tables.clone()
    tables[0, :used] = high.int()

    out = entry.run(problem, kv_cache=caches[0] if is_one else caches, block_tables=tables)

    problem.check(out)


def test_a_kernel_is_not_compiled_during_capture() -> None:
    """The first call of a kernel raises CaptureError instead of breaking the capture."""
    entry = ENTRY_POINTS["xqa_batch"]
    problem = entry.build("cuda", seq_lens=(70,), head_dim=176, page_size=7)
    out = problem.new_out()

    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        out.zero_()  # torch warns about an empty graph
        with pytest.raises(CaptureError):
            entry.run(problem, out=out)


@both
def test_two_streams_with_separate_workspaces(entry: EntryPoint) -> None:
    """Concurrent calls do not affect each other."""
    problems = [entry.build("cuda", seq_lens=(5000, 300), seed=s, q_len=2) for s in range(2)]
    arguments = [entry.arguments(problem) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[], []]

    for _ in range(50):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[index].append(entry.function(**arguments[index]))
    torch.cuda.synchronize()

    for problem, results in zip(problems, outs, strict=True):
        problem.check(results[0])
        assert all(torch.equal(results[0], other) for other in results)


@both
@pytest.mark.parametrize("enable_pdl", [None, True, False])
def test_pdl_changes_no_result(entry: EntryPoint, enable_pdl: bool | None) -> None:
    """A kernel that launches early waits for its inputs."""
    problem = entry.build("cuda", seq_lens=(5000, 300))
    arguments = entry.arguments(problem) | {"enable_pdl": enable_pdl}
    query = arguments["query"].clone()

    outs = []
    for _ in range(20):
        arguments["query"] = query * 1.0  # written right before it is read
        outs.append(entry.function(**arguments))

    assert all(torch.equal(out, outs[0]) for out in outs)
    problem.check(outs[0])


@both
def test_mlagen_check_reports_an_invalid_page_id(
    entry: EntryPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With MLAGEN_CHECK=1 an invalid page id is reported, also by a cached call."""
    problem = entry.build("cuda", seq_lens=(700, 3))
    out = entry.run(problem)
    tables = problem.block_tables.clone()
    tables[0, 2] = -7
    monkeypatch.setenv("MLAGEN_CHECK", "1")
    current_settings.cache_clear()

    with pytest.raises(ArgumentError) as caught:
        entry.run(problem, block_tables=tables)

    valid = f"0 to {len(problem.keys) - 1} (pages of the cache)"
    assert str(caught.value) == f"block_tables[0, 2]: expected {valid}, got -7"
    assert torch.equal(entry.run(problem), out)


def test_mlagen_check_excludes_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks synchronize, which a capture does not allow."""
    entry = ENTRY_POINTS["trtllm"]
    problem = entry.build("cuda", seq_lens=(70, 3))
    arguments = entry.arguments(problem)
    entry.run(problem)
    monkeypatch.setenv("MLAGEN_CHECK", "1")
    current_settings.cache_clear()

    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        problem.query.clone()  # torch warns about an empty graph
        with pytest.raises(CaptureError, match=r"^MLAGEN_CHECK: "):
            entry.function(**arguments)


@both
def test_a_cached_call_checks_base_addresses(entry: EntryPoint) -> None:
    """The alignment of each base address is checked in every call, unlike shapes."""
    problem = entry.build("cuda", seq_lens=(70, 3))
    entry.run(problem)
    memory = torch.zeros(problem.query.numel() + 8, dtype=torch.bfloat16, device="cuda")
    moved = memory[1 : 1 + problem.query.numel()].view(problem.query.shape)

    with pytest.raises(ArgumentError, match=r"query.data_ptr\(\): expected a multiple of 16"):
        entry.run(problem, query=moved)


@pytest.mark.parametrize("scale", [1e39, 10**400], ids=["float", "int"])
def test_a_scale_beyond_float32_is_rejected(scale: float) -> None:
    """A cached call rejects it, too, before anything is written."""
    entry = ENTRY_POINTS["trtllm"]
    problem = entry.build("cuda", seq_lens=(70, 3))
    out = problem.new_out()
    entry.run(problem, out=out, bmm1_scale=1.0 if isinstance(scale, float) else 1)
    out.fill_(7.0)

    with pytest.raises(ArgumentError, match=r"^bmm1_scale: expected a number that float32"):
        entry.run(problem, out=out, bmm1_scale=scale)

    assert (out == 7.0).all()


def test_ragged_queries_do_not_synchronize() -> None:
    """Without max_q_len the query lengths are read on the device."""
    problem = MlaCase(seq_lens=(700, 3), q_lens=(1, 5)).build("cuda")
    arguments = problem.arguments(max_q_len=None)
    entry_point = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla
    entry_point(**arguments)

    with no_device_sync():
        out = entry_point(**arguments)

    assert isinstance(out, torch.Tensor)
    problem.check(out)


@pytest.mark.parametrize("metadata", ["cpu", None], ids=["on the host", "on the device"])
@pytest.mark.parametrize("case", [SOME, SINGLE], ids=["ragged", "one token each"])
def test_plan_and_run_do_not_synchronize(case: MlaCase, metadata: str | None) -> None:
    """A plan and its run are enqueued without a device synchronization."""
    problem = case.build("cuda")
    arguments = plan_arguments(problem, metadata=metadata)
    wrapper = wrapper_of(problem)
    run(wrapper, problem)  # compiles and loads

    with no_device_sync():
        wrapper.plan(**arguments)
        out = run(wrapper, problem)

    problem.check(out)


@pytest.mark.parametrize("name", MASKS)
def test_flare_does_not_synchronize(name: str) -> None:
    """A call is enqueued without a device synchronization, ragged, padded or of one token."""
    problem = flare_case(mask=name).build("cuda")
    ragged = ENTRY_POINTS["flare"].arguments(problem)
    lens = torch.tensor(problem.case.lens, dtype=torch.int32, device="cuda")
    for width in (None, 5, 1):
        given = dict(ragged)
        if width is not None:
            query = torch.zeros(6, width, 6, 576, dtype=torch.bfloat16, device="cuda")
            given |= {"q": query, "valid_length": lens.clamp(max=width), "ragged": False}
        call = ENTRY_POINTS["flare"].function
        call(**given)  # compiles and loads

        with no_device_sync():
            out = call(**given)

        if width is None:
            problem.check(out)
