"""Decode context parallel over two GPUs that exchange by NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dcp_ranks import check_ranks
from tests.problems.mla import mla_case
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


@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")
def test_every_rank_has_its_heads_over_all_tokens(tmp_path: Path) -> None:
    """Each GPU's results are those of one call over all tokens."""
    check_ranks(RANKS, "nccl", tmp_path, CASES)
