"""Cached scheduler metadata across launches: a call never uses that of another call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mlagen
from mlagen.runtime import semaphores
from mlagen.spec.mla.sm90 import SCHED_META_BYTES, SCHED_META_OFFSET, SEMAPHORE_BYTES
from tests.graph_replay import captured
from tests.launch_repeats import SEQ_WORD
from tests.problems.entry_points import decode
from tests.problems.mla import MlaCase, MlaProblem, mla_case
from tests.sm90_tiles import needs_sm90

pytestmark = [needs_sm90, pytest.mark.usefixtures("sm90")]

FP8_DS_MLA = "bf16 over fp8_ds_mla"
CASES = {
    "16 bits": MlaCase(seq_lens=(), heads=128),
    "16 bits, few rows": MlaCase(seq_lens=(), heads=16),
    "e4m3": MlaCase(seq_lens=(), heads=128, dtype=torch.float8_e4m3fn),
    "e4m3, few rows": MlaCase(seq_lens=(), heads=16, dtype=torch.float8_e4m3fn),
    "fp8_ds_mla": mla_case(FP8_DS_MLA, seq_lens=(), heads=64),
    "sparse": mla_case(FP8_DS_MLA, seq_lens=(), heads=128, top_k=512),
    "sparse, 16 bits": MlaCase(seq_lens=(), heads=16, top_k=512),
}
LENGTHS = {
    "few": (3000, 70, 1),
    "one per CTA": (200,) * 128,
    "as many as are metadata": tuple(250 - 37 * i % 251 for i in range(256)),
}


@pytest.fixture
def workspace() -> torch.Tensor:
    """Return the workspace of all calls of a test."""
    return torch.full((128 << 20,), 0xFF, dtype=torch.uint8, device="cuda")


def changed_lengths(lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return other lengths with as many pages: one shorter, two reordered, and the original."""
    first, *others = lengths
    *before, last = lengths
    return [(first - 1, *others), (*others, first), (last, *before), lengths]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lengths_may_change_before_every_replay(
    case: MlaCase, lengths: tuple[int, ...], workspace: torch.Tensor
) -> None:
    """A graph has three calls, two of which reuse the schedule of the preceding one."""
    problem = replace(case, seq_lens=lengths).build("cuda")
    outs = [torch.empty_like(decode(problem)) for _ in range(3)]
    arguments = problem.arguments(workspace_buffer=workspace)

    def calls() -> None:
        for out in outs:
            mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments, out=out)

    graph = captured(calls)
    for now in changed_lengths(lengths):
        other = replace(case, seq_lens=now, seed=len(now) + now[0]).build("cuda")
        exchange(problem, other)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()

        for out in outs:
            other.check(out)
            assert torch.equal(out, outs[0])


def exchange(problem: MlaProblem, other: MlaProblem) -> None:
    """Copy the content of a problem of equal shapes into the tensors of a graph."""
    problem.query.copy_(other.query)
    problem.seq_lens.copy_(other.seq_lens)
    assert problem.kv_cache.shape == other.kv_cache.shape
    problem.kv_cache.copy_(other.kv_cache)
    problem.block_tables.copy_(other.block_tables)


def test_all_kernels_share_a_workspace(workspace: torch.Tensor) -> None:
    """Interleaved calls, twice each, do not use each other's metadata."""
    made: list[tuple[MlaProblem, Any]] = []
    for lengths in ((900, 70, 1), (70, 900, 1)):  # of equal lengths in another order
        for case in CASES.values():
            problem = replace(case, seq_lens=lengths).build("cuda")
            made.append((problem, problem.arguments(workspace_buffer=workspace)))
    outs = [[torch.empty_like(decode(problem)) for _ in range(4)] for problem, _ in made]
    for turn in range(2):
        for (_, arguments), into in zip(made, outs, strict=True):
            for out in into[turn * 2 :][:2]:
                mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments, out=out)

    for (problem, _), into in zip(made, outs, strict=True):
        problem.check(into[0])
        for out in into[1:]:
            assert torch.equal(out, into[0])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cached_metadata_is_used(case: MlaCase, workspace: torch.Tensor) -> None:
    """With the cached work invalidated, two kinds of calls that alternate write nothing."""
    problems = [
        replace(case, seq_lens=lengths).build("cuda") for lengths in ((900, 70, 1), (900, 60))
    ]
    outs = [torch.empty_like(decode(problem)) for problem in problems]

    def decode_all() -> None:
        for problem, out in zip(problems, outs, strict=True):
            arguments = problem.arguments(workspace_buffer=workspace, out=out)
            mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)

    decode_all()
    regions = regions_of(workspace)
    for region in regions:
        blocks = (len(region) - SCHED_META_OFFSET) // SCHED_META_BYTES
        metadata = region[SCHED_META_OFFSET:][: blocks * SCHED_META_BYTES].view(torch.int32)
        metadata.view(blocks, -1)[:, SEQ_WORD] = -1
    for out in outs:
        out.fill_(7.0)

    decode_all()

    for out in outs:
        assert torch.equal(out, torch.full_like(out, 7.0))
    for problem in problems:
        problem.seq_lens[1] -= 1  # invalidates the cache
    decode_all()
    for out in outs:
        assert not (out == 7.0).all(dim=-1).any()
    for region in regions:
        region[SEMAPHORE_BYTES:][:4].zero_()  # no later test finds what is left


def regions_of(workspace: torch.Tensor) -> list[torch.Tensor]:
    """Return the semaphores of a workspace with its cached metadata, as bytes."""
    size = semaphores._slabs[0].numel() // semaphores._REGIONS
    return [
        slab[region - slab.data_ptr() :][:size]
        for (_, address, _), region in semaphores._regions.items()
        for slab in semaphores._slabs
        if address == workspace.data_ptr() and 0 <= region - slab.data_ptr() < slab.numel()
    ]
