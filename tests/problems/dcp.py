"""Problems of one rank of decode context parallel, from those of all tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.problems.mla import MlaCase, MlaProblem, VisibleTokens
from tests.problems.problem import INVALID_IDS, POISON


def shard(problem: MlaProblem, case: MlaCase) -> MlaProblem:
    """Return the problem with the tokens of the rank of ``case`` in a cache of their own.

    Everything else in that cache is poison.
    """
    rows, size = problem.kv_cache.view(torch.uint8), case.page_size
    lens = case.local_lens
    counts = [-(-length // size) for length in lens]
    columns = max(counts, default=0) + case.spare_pages
    tables = torch.tensor(INVALID_IDS * columns)[:columns].repeat(len(lens), 1)
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(case.cp_rank))
    own = torch.full((len(order), *rows.shape[1:]), POISON, dtype=torch.uint8, device=rows.device)
    all_tables = problem.block_tables.cpu().long()
    for seq, (length, count) in enumerate(zip(lens, counts, strict=True)):
        tables[seq, :count], order = order[:count], order[count:]
        index = torch.arange(length)
        token = index * case.cp_world + case.cp_rank
        own[tables[seq, index // size], index % size] = rows[
            all_tables[seq, token // size], token % size
        ]
    seqs = [seq for seq, q_len in enumerate(case.lens) for _ in range(q_len)]
    return replace(
        problem,
        case=case,
        kv_cache=own.view(problem.kv_cache.dtype),
        block_tables=tables.to(torch.int32).to(rows.device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=rows.device),
        visible=[
            _of_rank(tokens, case, lens[seq])
            for tokens, seq in zip(problem.visible, seqs, strict=True)
        ],
    )


def _of_rank(tokens: VisibleTokens, case: MlaCase, length: int) -> VisibleTokens:
    attended = max(0, len(tokens.keys) - case.tokens_ahead)
    own = torch.arange(attended)[case.cp_rank :: case.cp_world][:length]
    return replace(
        tokens, keys=tokens.keys[own], values=tokens.values[own], counts=tokens.counts[own]
    )
