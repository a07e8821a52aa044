"""Calls whose query tokens have top-k indices of keys and of values."""

from __future__ import annotations

from typing import Any

import torch

from tests.problems.entry_points import trtllm_gqa_with_lse
from tests.problems.gqa import GqaCase
from tests.problems.problem import INVALID_IDS
from tests.problems.reference import attend, joined

# Query tokens of a sequence whose tokens the indices name.
TOP_K_CASES = [
    GqaCase(name="16 bits", seq_lens=(300,), q_len=6, head_dim=64),
    GqaCase(name="pages of one token", seq_lens=(130,), q_len=6, head_dim=64, page_size=1),
    GqaCase(name="e4m3", seq_lens=(300,), q_len=6, kv="e4m3", group=16, output_scale=0.5),
    GqaCase(name="nvfp4", seq_lens=(300,), q_len=6, kv="nvfp4", head_dim=64, layout="HND"),
]
_LENS = (40, 0, 1, 39, 77, -3)


def check_top_k(case: GqaCase, device: str, *, top_k: int = 40, **changes: Any) -> None:
    """Check a call with as many valid indices as :data:`_LENS` says; values are of other tokens."""
    generator = torch.Generator().manual_seed(1)
    problem = GqaCase(**vars(case) | {"kv_heads": 1}).build(device)
    tables, size = problem.block_tables[0].cpu(), case.page_size
    content, (length,) = problem.contents[0], case.seq_lens
    pairs = torch.stack(
        [
            torch.stack([torch.randperm(length, generator=generator)[:top_k] for _ in range(2)])
            for _ in _LENS
        ]
    )
    indices = (tables[pairs // size] * size + pairs % size).to(torch.int32)
    is_valid = torch.ones(len(_LENS), top_k, dtype=torch.bool)
    for place, (token, part) in enumerate(((0, 0), (0, 1), (3, 0), (4, 1))):
        indices[token, part, 5 * place] = INVALID_IDS[place]
        is_valid[token, 5 * place] = False
    rows, parts = problem.query.cpu(), []
    for token, count in enumerate(_LENS):
        named = is_valid[token] & (torch.arange(top_k) < count)
        keys, values = pairs[token][:, named]
        own = (rows[token], content.keys[keys, 0], content.values[values, 0])
        parts.append(attend(*own, score_scale=case.scale, output_scale=case.result_scale))

    result = trtllm_gqa_with_lse(
        problem,
        **{
            "sparse_top_k": top_k,
            "block_tables": indices.to(device),
            "seq_lens": torch.tensor(_LENS, dtype=torch.int32, device=device),
        }
        | changes,
    )

    problem.check(*result, expected=joined(parts))
