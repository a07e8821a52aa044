"""Decode context parallel over processes that exchange by gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mlagen.distributed import local_seq_lens
from tests.dcp_ranks import check_ranks
from tests.problems.mla import MlaCase, mla_case

RANKS = 4
CASES = (
    MlaCase(seq_lens=(70, 3, 0, 9), q_len=2, heads=8, with_sinks=True),
    mla_case("e4m3", seq_lens=(70, 3, 1), q_lens=(2, 5, 0), heads=4),
)


@pytest.mark.skipif(not dist.is_available(), reason="torch has no distributed package")
@pytest.mark.timeout(60)
def test_every_rank_has_its_heads_over_all_tokens(tmp_path: Path) -> None:
    """Four ranks of one or two heads each, with ragged and empty requests and a sink."""
    check_ranks(RANKS, "gloo", tmp_path, CASES)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_local_lengths_are_those_of_every_worldth_token(world: int) -> None:
    """For every rank and length."""
    lengths = torch.arange(50, dtype=torch.int32)
    for rank in range(world):
        local = local_seq_lens(lengths, world, rank)

        assert local.dtype is torch.int32
        assert local.tolist() == [len(range(rank, length, world)) for length in range(50)]
