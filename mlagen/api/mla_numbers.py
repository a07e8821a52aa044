"""The numbers and words of an MLA decode call, made plain before anything depends on them."""

from __future__ import annotations

import torch

from mlagen.api.arguments import (
    INT32_MAX,
    SCALES,
    plain_scale,
    plain_sinks,
    require_choice,
    require_flag,
    require_whole_number,
)
from mlagen.api.mla_args import MlaArgs
from mlagen.api.mla_problem import LSE_FACTORS


def with_plain_numbers(args: MlaArgs) -> MlaArgs:
    """Return the inputs with Python's own numbers, and with sinks of fp32.

    Raises
    ------
    ArgumentError
        If one is not of its kind, or a kernel's 32 bits cannot hold it.
    """
    # By position, as in the form: names cost more, and this runs at every call but the usual.
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
        bmm1_scale=plain_scale(bmm1, names.bmm1_scale),
        bmm2_scale=plain_scale(bmm2, names.bmm2_scale),
        sinks=None if sinks is None else plain_sinks(sinks),
        return_lse=require_flag(return_lse, "return_lse"),
        return_lse_base=require_choice(base, "return_lse_base", LSE_FACTORS),
        max_q_len=None if max_q_len is None else require_whole_number(max_q_len, "max_q_len"),
        top_k=require_whole_number(top_k, "sparse_mla_top_k"),
    )
