"""hpc-ops, whose decode of grouped queries is vLLM's HPC_ATTN on sm_90."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from mlagen.spec.dtype import DType

from ..calls import Call
from ..cases import Case
from ..inputs import Inputs
from .baseline import Baseline, has_16bit_query, version_of

PACKAGES = "hpc-ops"
INSTALL = "pip install git+https://github.com/Tencent/hpc-ops"

_HEAD_DIM, _PAGE_SIZE = 128, 64
_GROUPS = (4, 8)  # query heads of a KV head
_MAX_Q_LEN = 4
_MIN_SPLIT_TOKENS = 1024  # as vLLM's backend passes it


def find() -> list[Baseline]:
    """Return hpc-ops, if it is found."""
    found = version_of(PACKAGES)
    if found is None:
        return []

    def make(inputs: Inputs) -> Call:
        return hpc_call(import_module("hpc"), inputs)

    return [Baseline(name="hpc", version=found, serves=_serves, make=make)]


def _serves(case: Case) -> bool:
    has_dtypes = case.dtype is DType.BF16 and has_16bit_query(case)
    has_shape = case.head_dim_qk == _HEAD_DIM and case.page_size == _PAGE_SIZE
    is_plain = case.window_left < 0 and not case.soft_cap and not case.has_value_dims
    has_group = case.heads in {group * case.kv_heads for group in _GROUPS}
    is_known = has_dtypes and has_shape and is_plain and has_group
    return case.family == "gqa" and is_known and case.q_len <= _MAX_Q_LEN


def hpc_call(ops: Any, inputs: Inputs) -> Call:
    """Return the call, whose schedule is made here, once; it has the usual softmax scale.

    Over an e4m3 cache it takes an e4m3 query, which the call converts, with a scale for each row.
    """
    case, lengths = inputs.case, inputs.seq_lens
    is_fp8 = case.kv_dtype is DType.E4M3
    task_map = ops.get_attention_decode_task_workspace(
        case.batch, inputs.max_seq_len, case.kv_heads, min_process_len=_MIN_SPLIT_TOKENS
    )
    ops.assign_attention_decode_task(
        lengths, task_map, case.kv_heads, case.q_len, True, min_process_len=_MIN_SPLIT_TOKENS
    )
    decode, scales = ops.attention_decode_bf16, tuple[torch.Tensor, ...]()
    if is_fp8:
        one = torch.ones(1, device=lengths.device)
        scales = (torch.ones(case.batch * case.q_len, case.heads, device=lengths.device), one, one)
        decode = ops.attention_decode_fp8
    queries = [query.flatten(0, 1) for query in inputs.queries]
    out = torch.empty_like(queries[0])
    # Without it the FP8 op fills one in every call, though a schedule replaces it.
    split_flag = torch.zeros(case.batch, case.kv_heads, dtype=torch.int32, device=lengths.device)

    def call(index: int) -> torch.Tensor:
        query = queries[index].to(torch.float8_e4m3fn) if is_fp8 else queries[index]
        decode(
            query,
            inputs.keys[index].data,
            inputs.values[index].data,
            inputs.block_tables,
            lengths,
            *scales,
            mtp=case.q_len - 1,
            new_kv_included=True,
            task_map=task_map,
            split_flag=split_flag,
            output=out,
        )
        return out

    return call
