"""Conversion of an MLA decode call's numbers and options to canonical types."""

from __future__ import annotations

import torch

from mlagen.families.common.arguments import (
    INT32_MAX,
    SCALES,
    canonical_scale,
    canonical_sinks,
    require_choice,
    require_flag,
    require_whole_number,
)
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.problem import LSE_FACTORS


def canonical_numbers(args: MlaArgs) -> MlaArgs:
    """Return the arguments with built-in Python numbers and fp32 sinks.

    Raises
    ------
    ArgumentError
        If one has the wrong type, or exceeds 32 bits.
    """
    # By index, as in the signature: names cost more, and every call off the fast path runs this.
    rank, rope_dim, max_seq_len = args[3], args[4], args[7]
    bmm1, bmm2, sinks = args[9:12]
    return_lse, base, _, max_q_len, top_k = args[13:18]
    if (
        rank.__class__ is rope_dim.__class__ is max_seq_len.__class__ is top_k.__class__ is int
        and bmm1.__class__ in SCALES
        and bmm2.__class__ in SCALES
        and return_lse.__class__ is bool
        and base.__class__ is str
        and base in LSE_FACTORS
        and (sinks is None or (sinks.__class__ is torch.Tensor and sinks.dtype is torch.float32))
        and (max_q_len is None or (max_q_len.__class__ is int and 0 <= max_q_len <= INT32_MAX))
        and 0 <= max_seq_len <= INT32_MAX
        and 0 <= top_k <= INT32_MAX
        and 0 <= rank <= INT32_MAX
        and 0 <= rope_dim <= INT32_MAX
    ):
        return args
    names = args.names
    return args._replace(
        kv_lora_rank=require_whole_number(rank, "kv_lora_rank"),
        qk_rope_head_dim=require_whole_number(rope_dim, "qk_rope_head_dim"),
        max_seq_len=require_whole_number(max_seq_len, "max_seq_len"),
        bmm1_scale=canonical_scale(bmm1, names.bmm1_scale),
        bmm2_scale=canonical_scale(bmm2, names.bmm2_scale),
        sinks=None if sinks is None else canonical_sinks(sinks),
        return_lse=require_flag(return_lse, "return_lse"),
        return_lse_base=require_choice(base, "return_lse_base", LSE_FACTORS),
        max_q_len=None if max_q_len is None else require_whole_number(max_q_len, "max_q_len"),
        top_k=require_whole_number(top_k, "sparse_mla_top_k"),
    )
