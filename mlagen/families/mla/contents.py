"""Checks of the contents of an MLA call, with ``MLAGEN_CHECK=1``."""

from __future__ import annotations

import torch

from mlagen.families.common.arguments import reject, require_tensor
from mlagen.families.common.device_checks import (
    check_seq_lens,
    check_tables,
    query_lengths,
    require_no_capture,
    table_capacity,
)
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.problem import MlaProblem
from mlagen.families.mla.two_pools import check_list_contents, check_lists


def check_contents(args: MlaArgs, problem: MlaProblem) -> None:
    """Reject inconsistent lengths, tables and offsets; synchronizes with the device."""
    require_no_capture(args.query)
    if args.kv_cache_format is not None:
        check_list_contents(check_lists(args, problem.tokens))
        return
    names, page_size = args.names, problem.variant.page_size
    q_lens = torch.full((problem.batch,), problem.q_len, dtype=torch.int64, device="cpu")
    if args.cum_seq_lens_q is not None:
        q_lens = query_lengths(
            args.cum_seq_lens_q,
            names.cum_seq_lens_q,
            problem.tokens,
            may_have_more=args.is_planned,
        )
    if args.top_k_lens is not None:  # the kernels do not read seq_lens then
        return
    capacity: int | torch.Tensor | None = problem.max_pages * page_size
    if problem.top_k:  # the kernels skip invalid indices by contract
        capacity = None
    elif args.kv_indptr is not None:
        capacity = table_capacity(
            args.kv_indptr,
            names.kv_indptr,
            page_ids=problem.max_pages,
            page_size=page_size,
        )
    if args.causal_seqlens_kv_global is not None:  # of all ranks; this one may have fewer tokens
        check_seq_lens(
            args.causal_seqlens_kv_global,
            "causal_seqlens_kv_global",
            capacity=None,
            q_lens=q_lens,
        )
    has_all_tokens = not args.is_planned and args.causal_seqlens_kv_global is None
    seq_lens = check_seq_lens(
        require_tensor(args.seq_lens, names.seq_lens),
        names.seq_lens,
        capacity=capacity,
        q_lens=q_lens if args.is_causal and has_all_tokens else None,
    )
    if problem.top_k:
        return
    if args.bias is not None and len(seq_lens) and int(seq_lens.max()) > args.bias.shape[2]:
        reject(
            f"max({names.seq_lens})", f"{args.bias.shape[2]} (bias) or less", int(seq_lens.max())
        )
    check_tables(args, problem, seq_lens, page_size)
