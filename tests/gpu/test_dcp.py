"""Decode context parallel on a GPU: every kernel, and every number of ranks up to eight."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla
from tests.problems.entry_points import decode_with_lse
from tests.problems.mla import MlaCase, mla_case
from tests.test_dcp import KINDS, RAGGED, check_whole, merged_ranks

# Few rows, a tile of 32, a tile of 64, and several tiles in a CTA group.
HEADS = (3, 10, 33, 128)
WORLDS = range(1, 9)
LONG: dict[str, Any] = {"seq_lens": (9000, 1, 0, 2500, 511), "page_size": 64}


def _check_every_rank(kind: str, world: int, **facts: Any) -> None:
    """Fail unless each rank is right; what a kernel may not read is NaN."""
    for rank in range(world):
        case = mla_case(kind, **facts, cp_world=world, cp_rank=rank)
        problem = case.build("cuda")
        problem.check(*decode_with_lse(problem), what=f"rank {rank}: ")


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_and_empty_requests(kind: str, world: int, heads: int) -> None:
    """By the sm90 kernels where they cover the kind."""
    _check_every_rank(kind, world, **RAGGED | {"heads": heads}, with_sinks=True)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_chosen_kernels(kind: str, world: int) -> None:
    """Small calls take the sm80 kernel, and long ones are split."""
    _check_every_rank(kind, world, **RAGGED)
    _check_every_rank(kind, world, **LONG, heads=16, q_len=3)
    _check_every_rank(kind, world, **RAGGED | {"page_size": 1, "heads": 33})


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("page_size", [16, 48, 64, 128])
@pytest.mark.parametrize("facts", [{"tokens_ahead": 5}, {"tokens_missing": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_shorter_of_both_lengths_holds(
    kind: str, facts: dict[str, int], page_size: int
) -> None:
    """That of the rank's cache, and that of all ranks, in pages of whole TMA boxes."""
    _check_every_rank(
        kind, 3, seq_lens=(700, 3, 64), q_len=4, heads=20, page_size=page_size, **facts
    )


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_of_the_rank_may_be_nan(kind: str, heads: int) -> None:
    """Tokens in the cache that no query token attends to have no effect."""
    case = mla_case(kind, seq_lens=(700, 70), heads=heads, cp_world=2, cp_rank=1, tokens_ahead=300)
    problem = case.build("cuda")
    for seq, length in enumerate(case.local_lens):
        for position in range(length):
            if not problem.sees(seq, 0, position):
                problem.poison(seq, position)

    problem.check(*decode_with_lse(problem))


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize(("kind", "world"), [*product(("bf16", "bf16 over fp8_ds_mla"), WORLDS)])
def test_the_ranks_merge_to_the_whole(kind: str, world: int) -> None:
    """The kernel that combines states gives what one call over all tokens gives."""
    problem = mla_case(kind, **LONG, heads=64, q_len=2, with_sinks=True).build("cuda")

    check_whole(problem, *merged_ranks(problem, world))


@pytest.mark.usefixtures("sm90")
def test_global_lengths_may_change_in_a_graph() -> None:
    """A captured call reads them, and caches no schedule that depends on them."""
    case = MlaCase(seq_lens=(700, 70), q_len=2, heads=16, cp_world=2, cp_rank=0)
    shorter = MlaCase(seq_lens=(700, 70), q_len=2, heads=16, cp_world=2, cp_rank=0, tokens_ahead=40)
    problem, other = case.build("cuda"), shorter.build("cuda")
    arguments = problem.arguments(return_lse=True)
    lengths = arguments["causal_seqlens_kv_global"]
    problem.check(*trtllm_batch_decode_with_kv_cache_mla(**arguments))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = trtllm_batch_decode_with_kv_cache_mla(**arguments)

    graph.replay()
    problem.check(out, lse)
    lengths -= 40
    graph.replay()

    other.check(out, lse)
