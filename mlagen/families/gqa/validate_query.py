"""Layout checks of a grouped-query decode call's query, and its tokens per request."""

from __future__ import annotations

import torch

from mlagen.families.common.arguments import (
    DTYPES,
    check_token_stride,
    reject,
    require,
    require_aligned,
    require_contiguous,
    require_dense_last_dim,
    require_dims,
    require_dtype,
    require_index,
    require_ints,
    require_shape,
    require_tensor,
)
from mlagen.families.gqa.args import GqaArgs


def check_query(args: GqaArgs) -> torch.Tensor:
    """Return the query, if its layout matches ``q_len`` and ragged lengths."""
    name = args.names.query
    query = require_tensor(args.query, name)
    is_ragged = args.cum_seq_lens_q is not None
    if is_ragged and args.q_len == 1:
        reject(args.names.q_len, "2 or more with " + args.names.cum_seq_lens_q, 1)
    if is_ragged or not args.with_beam_axis:
        require_dims(query, name, (3,))
    else:
        require_dims(query, name, (5,) if args.q_len > 1 else (4, 5))
        require(query.shape[1] == 1, f"{name}.shape[1]", 1, query.shape[1])
        if query.dim() == 5:
            q_len = query.shape[2]
            expected = f"{args.q_len} ({args.names.q_len})"
            require(q_len == args.q_len, f"{name}.shape[2]", expected, q_len)
    require_dtype(query, name, tuple(DTYPES))
    require_dense_last_dim(query, name)
    require_aligned(query, name)
    require(query.shape[-2] >= 1, f"{name}.shape[-2]", "1 head or more", query.shape[-2])
    return query


def check_query_tokens(args: GqaArgs) -> tuple[int, int, int]:
    """Return the batch size, the query tokens, and the stride between query tokens."""
    names, query, q_len = args.names, args.query, args.q_len
    seq_lens = require_tensor(args.seq_lens, names.seq_lens)
    require_index(seq_lens, names.seq_lens, query.device)
    require_dims(seq_lens, names.seq_lens, (1, 2))
    require_contiguous(seq_lens, names.seq_lens)
    cu_seqlens_q = args.cum_seq_lens_q
    if cu_seqlens_q is not None:
        batch, tokens = seq_lens.shape[0], query.shape[0]
        shape = (batch + 1,)
        require_ints(cu_seqlens_q, names.cum_seq_lens_q, query.device, (shape,), "batch + 1")
        rule = f"{batch * q_len} or less (batch * {names.q_len})"
        require(tokens <= batch * q_len, f"{names.query}.shape[0]", rule, tokens)
    elif args.with_beam_axis:
        batch = query.shape[0]
        tokens = batch * q_len
    else:
        tokens = query.shape[0]
        multiple = f"a multiple of {q_len} ({names.q_len})"
        require(tokens % q_len == 0, f"{names.query}.shape[0]", multiple, tokens)
        batch = tokens // q_len
    require_shape(seq_lens, names.seq_lens, ((batch,), (batch, 1)), f"batch of {names.query}")
    if query.dim() != 5 or q_len == 1:
        return batch, tokens, query.stride(0)
    check_token_stride(query[:, 0], names.query)
    return batch, tokens, query.stride(2)
