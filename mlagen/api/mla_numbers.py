"""The numbers and words of an MLA decode call, made plain before anything depends on them."""

from __future__ import annotations

from mlagen.api.arguments import (
    INT32_MAX,
    plain_scale,
    plain_sinks,
    require_choice,
    require_flag,
    require_whole_number,
)
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_request import LSE_FACTORS


def with_plain_numbers(inputs: MlaInputs) -> MlaInputs:
    """Return the inputs with Python's own numbers, and with sinks of fp32.

    Raises
    ------
    ArgumentError
        If one is not of its kind, or a kernel's 32 bits cannot hold it.
    """
    if (
        inputs.kv_lora_rank.__class__ is inputs.qk_rope_head_dim.__class__ is int
        and inputs.max_seq_len.__class__ is inputs.top_k.__class__ is int
        and inputs.bmm1_scale.__class__ is inputs.bmm2_scale.__class__ is float
        and inputs.return_lse.__class__ is bool
        and inputs.return_lse_base.__class__ is str
        and inputs.return_lse_base in LSE_FACTORS
        and inputs.sinks is None
        and inputs.max_q_len is None
        and 0 <= inputs.max_seq_len <= INT32_MAX
        and 0 <= inputs.top_k <= INT32_MAX
        and 0 <= inputs.kv_lora_rank <= INT32_MAX
        and 0 <= inputs.qk_rope_head_dim <= INT32_MAX
    ):
        return inputs
    names, longest = inputs.names, inputs.max_q_len
    return inputs._replace(
        kv_lora_rank=require_whole_number(inputs.kv_lora_rank, "kv_lora_rank"),
        qk_rope_head_dim=require_whole_number(inputs.qk_rope_head_dim, "qk_rope_head_dim"),
        max_seq_len=require_whole_number(inputs.max_seq_len, "max_seq_len"),
        bmm1_scale=plain_scale(inputs.bmm1_scale, names.bmm1_scale),
        bmm2_scale=plain_scale(inputs.bmm2_scale, names.bmm2_scale),
        sinks=None if inputs.sinks is None else plain_sinks(inputs.sinks),
        return_lse=require_flag(inputs.return_lse, "return_lse"),
        return_lse_base=require_choice(inputs.return_lse_base, "return_lse_base", LSE_FACTORS),
        max_q_len=None if longest is None else require_whole_number(longest, "max_q_len"),
        top_k=require_whole_number(inputs.top_k, "sparse_mla_top_k"),
    )
