"""mlagen call of a case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch

from mlagen.decode import xqa_batch_decode_with_kv_cache
from mlagen.families.workspace import workspace_bytes
from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla
from mlagen.spec.mla.variant import output_dtype

from .cases import KV_LORA_RANK
from .inputs import TORCH_DTYPES, Inputs, element_scale

# Runs the input set of that index and returns the output.
Call: TypeAlias = Callable[[int], torch.Tensor]


def mlagen_call(inputs: Inputs) -> Call:
    """Return the call of mlagen's entry point for the case."""
    make = _mla_call if inputs.case.family == "mla" else _gqa_call
    return make(inputs, _workspace(inputs))


def _mla_call(inputs: Inputs, workspace: torch.Tensor) -> Call:
    shared = _shared(inputs)
    caches = [keys.data.squeeze(2) for keys in inputs.keys]
    if inputs.topk_indices is not None:
        shared |= {"block_tables": inputs.topk_indices, "sparse_mla_top_k": inputs.case.top_k}

    def call(index: int) -> torch.Tensor:
        out = trtllm_batch_decode_with_kv_cache_mla(
            inputs.queries[index],
            caches[index],
            workspace,
            qk_nope_head_dim=128,
            kv_lora_rank=KV_LORA_RANK,
            qk_rope_head_dim=inputs.case.qk_rope_head_dim,
            **shared,
        )
        assert not isinstance(out, tuple), "no LSE was requested"
        return out

    return call


def _gqa_call(inputs: Inputs, workspace: torch.Tensor) -> Call:
    shared = _shared(inputs)
    queries = [query.flatten(0, 1) for query in inputs.queries]
    pairs = list(zip(inputs.keys, inputs.values, strict=True))
    caches = [(keys.data, values.data) for keys, values in pairs]
    scales = [
        None
        if keys.block_scales is None or values.block_scales is None
        else (keys.block_scales, values.block_scales)
        for keys, values in pairs
    ]

    def call(index: int) -> torch.Tensor:
        out = xqa_batch_decode_with_kv_cache(
            queries[index],
            caches[index],
            workspace,
            q_len_per_req=inputs.case.q_len,
            window_left=inputs.case.window_left,
            kv_cache_sf=scales[index],
            **shared,
        )
        return cast("torch.Tensor", out)

    return call


def _shared(inputs: Inputs) -> dict[str, Any]:
    case = inputs.case
    rows = (case.batch, case.q_len) if case.family == "mla" else (case.batch * case.q_len,)
    out = torch.empty(
        *rows,
        case.heads,
        case.head_dim_vo,
        dtype=TORCH_DTYPES[output_dtype(case.dtype)],
        device=inputs.seq_lens.device,
    )
    factor = element_scale(case.kv_dtype)
    return {
        "block_tables": inputs.block_tables,
        "seq_lens": inputs.seq_lens,
        "max_seq_len": inputs.max_seq_len,
        "bmm1_scale": inputs.scale * factor,
        "bmm2_scale": factor,
        "out": out,
    }


def _workspace(inputs: Inputs) -> torch.Tensor:
    case, device = inputs.case, inputs.seq_lens.device
    if device.type == "cpu":  # the CPU backend needs none
        return torch.empty(0, dtype=torch.uint8)
    is_gqa = case.family == "gqa"
    size = workspace_bytes(
        batch=case.batch,
        q_len=case.q_len,
        heads=case.heads,
        max_seq_len=inputs.max_seq_len,
        dtype=TORCH_DTYPES[case.dtype],
        kv_dtype=inputs.keys[0].data.dtype,
        qk_rope_head_dim=case.qk_rope_head_dim,
        page_size=case.page_size,
        sparse_mla_top_k=case.top_k,
        kv_heads=case.kv_heads if is_gqa else None,
        head_dim=case.head_dim_qk if is_gqa else None,
        window_left=case.window_left,
        device=device,
    )
    return torch.empty(size, dtype=torch.uint8, device=device)
