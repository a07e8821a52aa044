"""Decode context parallel over two GPUs that exchange by NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mlagen.distributed import decode_cp
from tests.dcp_ranks import check_errors, check_heads, check_replays, rank_arguments, run_ranks
from tests.problems.mla import MlaCase, mla_case
from tests.test_dcp import KINDS

RANKS = 2
CASES = tuple(
    case
    for kind in KINDS
    for case in (
        mla_case(kind, seq_lens=(9000, 3, 0, 2500), q_len=2, heads=32, with_sinks=True),
        mla_case(kind, seq_lens=(300, 3, 1), q_lens=(2, 5, 0), heads=16),
    )
)
ONE_TOKEN = MlaCase(seq_lens=(60_000,), heads=128)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"),
]


def test_every_rank_has_its_heads_over_all_tokens(tmp_path: Path) -> None:
    """Each GPU's results are those of one call over all tokens."""
    run_ranks(check_heads, RANKS, "nccl", tmp_path, CASES)


def test_an_error_of_a_rank_is_known_to_all(tmp_path: Path) -> None:
    """The other ranks get NaN and wait for nothing, and the next calls pair."""
    run_ranks(check_errors, RANKS, "nccl", tmp_path, CASES[:1])


def test_a_replay_follows_all_content_of_the_tensors(tmp_path: Path) -> None:
    """Lengths, tables, caches, sinks and queries may change; a replay equals a call."""
    run_ranks(check_replays, RANKS, "nccl", tmp_path, (*CASES, ONE_TOKEN))


def _check_kernels(case: MlaCase, device: str, world: int, rank: int) -> None:
    own = MlaCase(seq_lens=case.seq_lens, heads=case.heads, cp_world=world, cp_rank=rank)
    arguments = rank_arguments(own.build(device))
    arguments["query"] = arguments["query"].contiguous()
    decode_cp(**arguments)
    torch.cuda.synchronize()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decode_cp(**arguments)
        torch.cuda.synchronize()

    on_gpu = [
        event.name
        for event in profile.events()
        if str(event.device_type) == "DeviceType.CUDA"
        and not event.name.startswith("nccl:")  # an annotation of torch
        and event.name != "combine"  # of an sm80 kernel's splits
    ]
    assert len(on_gpu) == 5, on_gpu


def test_one_query_token_takes_five_kernels(tmp_path: Path) -> None:
    """The all-gather, the decode, a copy into messages, the all-to-all and the merge."""
    run_ranks(_check_kernels, RANKS, "nccl", tmp_path, (ONE_TOKEN,))
