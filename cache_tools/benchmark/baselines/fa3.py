"""FlashAttention-3 as vLLM builds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mlagen.spec.dtype import DType

from ..calls import Call
from ..cases import KV_LORA_RANK, QK_ROPE_HEAD_DIM, Case
from ..inputs import Inputs
from .baseline import (
    Baseline,
    cu_seqlens_q_of,
    has_16bit_query,
    shared_library,
    with_topk_as_tables,
)

PACKAGES = "vllm"
INSTALL = "pip install --no-deps --target DIR vllm, and pass --libraries DIR"

_MAX_HEAD_DIM = 256  # of K
_VALUE_DIMS = (192, 128)  # of K and V, where they differ


def find() -> list[Baseline]:
    """Return the build of vLLM, if it is found."""
    library = shared_library("vllm", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
    if library is None:
        return []

    def make(inputs: Inputs) -> Call:
        library.load()
        ops = torch.ops._vllm_fa3_C  # noqa: SLF001
        return _mla_call(ops, inputs) if inputs.case.family == "mla" else _gqa_call(ops, inputs)

    return [Baseline(name="fa3", version=library.version, serves=_serves, make=make)]


def _serves(case: Case) -> bool:
    has_dims = case.family == "mla" or case.head_dim_qk <= _MAX_HEAD_DIM
    if case.has_value_dims:
        has_dims = (case.head_dim_qk, case.head_dim_vo) == _VALUE_DIMS
    return has_dims and has_16bit_query(case)


def _mla_call(ops: Any, inputs: Inputs) -> Call:
    """Return the call with the latent part as value, and the latent query beside the rope one.

    The kernel has keys of 64 elements. Without a rope part, as in vLLM, they are the first latent
    ones, under a query of zeros that is made here, once.
    """
    inputs = with_topk_as_tables(inputs)
    queries = [query.flatten(0, 1) for query in inputs.queries]
    attend = _attention(ops, inputs, QK_ROPE_HEAD_DIM, KV_LORA_RANK, None)
    has_rope = inputs.case.qk_rope_head_dim > 0
    zeros = torch.zeros_like(queries[0][..., :QK_ROPE_HEAD_DIM])

    def call(index: int) -> torch.Tensor:
        query, cache = queries[index], inputs.keys[index].data
        rope = query[..., KV_LORA_RANK:] if has_rope else zeros
        keys = cache[..., KV_LORA_RANK:] if has_rope else cache[..., :QK_ROPE_HEAD_DIM]
        return attend(rope, keys, cache[..., :KV_LORA_RANK], query[..., :KV_LORA_RANK])

    return call


def _gqa_call(ops: Any, inputs: Inputs) -> Call:
    """Return the call; FA3 takes an e4m3 query over an e4m3 cache, so the call converts it."""
    case = inputs.case
    is_fp8 = case.kv_dtype is DType.E4M3
    ones = torch.ones(case.batch, case.kv_heads, device=inputs.seq_lens.device)
    dims = (case.head_dim_qk, case.head_dim_vo)
    attend = _attention(ops, inputs, *dims, ones if is_fp8 else None)
    queries = [query.flatten(0, 1) for query in inputs.queries]

    def call(index: int) -> torch.Tensor:
        query = queries[index].to(torch.float8_e4m3fn) if is_fp8 else queries[index]
        return attend(query, inputs.keys[index].data, inputs.values[index].data, None)

    return call


def _attention(
    ops: Any, inputs: Inputs, head_dim: int, head_dim_v: int, descale: torch.Tensor | None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Return the op with all arguments but the tensors; its schedule is made here, once."""
    case = inputs.case
    cu_seqlens_q, max_seq_len = cu_seqlens_q_of(inputs), inputs.max_seq_len
    window = (case.window_left, 0 if case.window_left >= 0 else -1)
    schedule = ops.get_scheduler_metadata(
        case.batch,
        case.q_len,
        max_seq_len,
        case.heads,
        case.kv_heads,
        head_dim,
        head_dim_v,
        inputs.keys[0].data.dtype,
        inputs.seq_lens,
        cu_seqlens_q,
        None,  # cu_seqlens_k
        None,  # cu_seqlens_k_new
        None,  # seqused_q
        None,  # leftpad_k
        case.page_size,
        0,  # max_seqlen_k_new
        True,  # causal
        *window,
        case.soft_cap > 0,
        0,  # num_splits: by heuristics
        None,  # pack_gqa
        0,  # sm_margin
    )

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, latent: torch.Tensor | None
    ) -> torch.Tensor:
        out: torch.Tensor = ops.fwd(
            query,
            keys,
            values,
            None,  # k_new
            None,  # v_new
            latent,  # q_v
            None,  # out
            cu_seqlens_q,
            None,  # cu_seqlens_k
            None,  # cu_seqlens_k_new
            None,  # seqused_q
            inputs.seq_lens,
            case.q_len,
            max_seq_len,
            inputs.block_tables,
            *(None,) * 5,  # kv_batch_idx, leftpad_k, rotary embeddings
            *(descale,) * 3,
            inputs.scale,
            True,  # causal
            *window,
            float(case.soft_cap),
            True,  # is_rotary_interleaved
            schedule,
            0,  # num_splits: by heuristics
            None,  # pack_gqa
            0,  # sm_margin
            None,  # sinks
            1,  # context-parallel world size
            0,  # context-parallel rank
            None,  # context-parallel lengths
        )[0]
        return out

    return attend
