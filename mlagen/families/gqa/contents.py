"""Checks of the contents of a grouped-query call's tensors, with ``MLAGEN_CHECK=1``."""

from __future__ import annotations

import torch

from mlagen.families.common.arguments import reject
from mlagen.families.common.device_checks import (
    check_seq_lens,
    check_tables,
    query_lengths,
    require_no_capture,
    table_capacity,
)
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.problem import GqaProblem


def check_contents(args: GqaArgs, problem: GqaProblem) -> None:
    """Reject inconsistent lengths, tables and offsets; synchronizes with the device."""
    require_no_capture(args.query)
    names, page_size = args.names, problem.variant.page_size
    if args.seq_lens is None:  # of a sparse call
        return
    seq_lens = args.seq_lens
    q_lens = torch.full((problem.batch,), problem.max_q_len, dtype=torch.int64, device="cpu")
    if args.cum_seq_lens_q is not None:
        q_lens = query_lengths(args.cum_seq_lens_q, names.cum_seq_lens_q, problem.tokens)
        for request, q_len in enumerate(q_lens.tolist()):
            if q_len > problem.max_q_len:
                rule = f"{problem.max_q_len} ({names.q_len}) or less"
                reject(f"{names.cum_seq_lens_q}.diff()[{request}]", rule, q_len)
    if args.has_head_tables and args.block_tables is not None:
        args = args._replace(block_tables=args.block_tables.flatten(0, 1))
        q_lens = q_lens.repeat(problem.kv_heads)
    lengths = args.causal_seqlens_kv_global
    if lengths is not None:
        check_seq_lens(lengths, "causal_seqlens_kv_global", capacity=None, q_lens=None)
    has_all_tokens = args.is_causal and args.kv_indptr is None and lengths is None
    capacity: int | torch.Tensor = problem.max_pages * page_size
    if args.block_tables is None:  # lengths of indices
        capacity = problem.num_indices
    if args.kv_indptr is not None:
        capacity = table_capacity(
            args.kv_indptr, names.kv_indptr, page_ids=problem.max_pages, page_size=page_size
        )
    seq_lens = check_seq_lens(
        seq_lens.flatten(),
        names.seq_lens,
        capacity=capacity,
        q_lens=q_lens if has_all_tokens else None,
    )
    if not problem.variant.sparse_block:  # it may name pages that are not there
        check_tables(args, problem, seq_lens, page_size)
