"""What blocks begin with, kept from launch to launch: never that of another call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import mlagen
from mlagen.runtime import semaphores
from mlagen.spec.mla_sm90 import SCHED_META_BYTES, SCHED_META_OFFSET
from tests.cases import MlaCase, MlaProblem
from tests.graph_replay import captured
from tests.hopper_tiles import taking_hopper_kernels
from tests.launch_repeats import REQUEST_WORD
from tests.mla_cases import KINDS, of_kind
from tests.mla_semantics import decode

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

PACKED = KINDS["bf16 over fp8_ds_mla"]
CASES = {
    "16 bits": MlaCase(name="", seq_lens=(), heads=128),
    "16 bits, few rows": MlaCase(name="", seq_lens=(), heads=16),
    "e4m3": MlaCase(name="", seq_lens=(), heads=128, dtype=torch.float8_e4m3fn),
    "e4m3, few rows": MlaCase(name="", seq_lens=(), heads=16, dtype=torch.float8_e4m3fn),
    "packed": of_kind(PACKED, name="", seq_lens=(), heads=64),
    "lists": of_kind(PACKED, name="", seq_lens=(), heads=128, top_k=512),
}
LENGTHS = {
    "few": (3000, 70, 1),
    "one for each block": (200,) * 128,
    "as many as are kept": tuple(250 - 37 * i % 251 for i in range(256)),
}


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have every call of this file take a sm90 kernel."""
    with taking_hopper_kernels(monkeypatch):
        yield


@pytest.fixture
def workspace() -> torch.Tensor:
    """Return memory for all calls of a test."""
    return torch.full((128 << 20,), 0xFF, dtype=torch.uint8, device="cuda")


def changed(lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return other lengths on as many pages: of one request, in other orders, and these again."""
    first, *others = lengths
    *before, last = lengths
    return [(first - 1, *others), (*others, first), (last, *before), lengths]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lengths_may_change_before_every_replay(
    case: MlaCase, lengths: tuple[int, ...], workspace: torch.Tensor
) -> None:
    """A graph of three calls, of which two have the lengths of the one before."""
    problem = replace(case, seq_lens=lengths).build("cuda")
    outs = [torch.empty_like(decode(problem)) for _ in range(3)]
    arguments = problem.arguments(workspace_buffer=workspace)

    def calls() -> None:
        for out in outs:
            mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments, out=out)

    graph = captured(calls, {})
    for now in changed(lengths):
        other = replace(case, seq_lens=now, seed=len(now) + now[0]).build("cuda")
        exchange(problem, other)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()

        for out in outs:
            other.check(out)
            assert torch.equal(out, outs[0])


def exchange(problem: MlaProblem, other: MlaProblem) -> None:
    """Copy what a problem of the same shapes has to where a graph looks for it."""
    problem.query.copy_(other.query)
    problem.seq_lens.copy_(other.seq_lens)
    assert problem.kv_cache.shape == other.kv_cache.shape
    problem.kv_cache.copy_(other.kv_cache)
    problem.block_tables.copy_(other.block_tables)


def test_calls_of_every_kind_share_a_workspace(workspace: torch.Tensor) -> None:
    """In turns, twice each: what one of them leaves is not the next one's."""
    made: list[tuple[MlaProblem, Any]] = []
    for lengths in ((900, 70, 1), (70, 900, 1)):  # of neighbours alike
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
def test_what_was_kept_is_taken(case: MlaCase, workspace: torch.Tensor) -> None:
    """Told that there is nothing to do, blocks of the next launch write nothing."""
    problem = replace(case, seq_lens=(900, 70, 1)).build("cuda")
    out = torch.empty_like(decode(problem))
    arguments = problem.arguments(workspace_buffer=workspace, out=out)
    decode_again = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla
    decode_again(**arguments)
    region = semaphores._regions[0, workspace.data_ptr()]
    (slab,) = (slab for slab in semaphores._slabs if 0 <= region - slab.data_ptr() < slab.numel())
    beside = slab[region - slab.data_ptr() :][: slab.numel() // semaphores._REGIONS]
    blocks = (len(beside) - SCHED_META_OFFSET) // SCHED_META_BYTES
    kept = beside[SCHED_META_OFFSET:][: blocks * SCHED_META_BYTES].view(torch.int32)
    kept.view(blocks, -1)[:, REQUEST_WORD] = -1
    out.fill_(7.0)

    decode_again(**arguments)

    assert torch.equal(out, torch.full_like(out, 7.0))
    problem.seq_lens[1] -= 1  # and so they are found again
    decode_again(**arguments)
    assert not (out == 7.0).all(dim=-1).any()
