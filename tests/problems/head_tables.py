"""Calls whose KV heads have block tables and lengths of their own."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from tests.problems.entry_points import trtllm_gqa_with_lse
from tests.problems.gqa import GqaCase, GqaProblem
from tests.problems.reference import Attention

# Of as many sequences for each of two KV heads.
_LENS = (300, 17, 0, 128, 1, 200)
HEAD_TABLES_CASES = [
    GqaCase(name="lengths", seq_lens=_LENS, head_dim=64),
    GqaCase(name="drafts", seq_lens=_LENS, q_len=3, head_dim=64, sink=2.0, page_size=64),
    GqaCase(name="a mask", seq_lens=_LENS, q_len=3, head_dim=64, mask="random"),
    GqaCase(name="e4m3", seq_lens=_LENS, kv="e4m3", layout="HND", output_scale=0.5),
    GqaCase(name="nvfp4", seq_lens=_LENS, kv="nvfp4", head_dim=64),
]


def check_head_tables(case: GqaCase, device: str, **changes: Any) -> None:
    """Check a call in which KV head h reads sequence h * batch + b of a case for request b."""
    problem = case.build(device)
    expected = problem.expected()
    heads, batch = case.kv_heads, len(case.seq_lens) // case.kv_heads

    def picked(rows: torch.Tensor, q_len: int = case.q_len) -> torch.Tensor:
        """Return the rows of each KV head in its own sequences, ``[batch * q_len, heads, ...]``."""
        grouped = rows.view(heads, batch * q_len, heads, case.group, *rows.shape[2:])
        own = [grouped[head, :, head] for head in range(heads)]
        return torch.cat(own, dim=1)

    bits = problem.bits
    call: GqaProblem = replace(
        problem,
        query=picked(problem.query),
        case=replace(case, seq_lens=case.seq_lens[:batch]),
        bits=None if bits is None else bits[: batch * case.q_len],
    )
    if bits is not None:  # of the requests, whichever head attends
        expected = replace(problem, bits=bits[: batch * case.q_len].repeat(heads, 1)).expected()
    named = {one.name: picked(getattr(expected, one.name)) for one in fields(Attention)}

    result = trtllm_gqa_with_lse(
        call,
        **{
            "enable_block_sparse_attention": True,
            "block_tables": problem.block_tables.view(heads, batch, -1),
            "seq_lens": problem.seq_lens.view(heads, batch),
        }
        | changes,
    )

    call.check(*result, expected=Attention(**named))
