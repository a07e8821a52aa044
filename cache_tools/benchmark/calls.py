"""mlagen call of a case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch.nn.functional import pad

from mlagen.decode import xqa_batch_decode_with_kv_cache
from mlagen.families.workspace import workspace_bytes
from mlagen.mla import (
    trtllm_batch_decode_sparse_mla_dsv4,
    trtllm_batch_decode_with_kv_cache_mla,
)
from mlagen.msa_ops import msa_sparse_decode_attention
from mlagen.sparse import qsa_sparse_paged_attention
from mlagen.spec.dtype import DType
from mlagen.spec.mla.variant import output_dtype

from .cases import KV_LORA_RANK, Case
from .inputs import TORCH_DTYPES, Inputs, element_scale
from .pools import PoolInputs

# Runs the input set of that index and returns the output.
Call: TypeAlias = Callable[[int], torch.Tensor]


def mlagen_call(inputs: Inputs) -> Call:
    """Return the call of mlagen's entry point for the case."""
    if isinstance(inputs, PoolInputs):
        return _two_pool_call(inputs, _workspace(inputs))
    if inputs.case.sparse_block > 1:
        return msa_call(msa_sparse_decode_attention, inputs, block_indices_of(inputs))
    if inputs.case.is_sparse_gqa:
        return qsa_call(qsa_sparse_paged_attention, inputs)
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


def _two_pool_call(inputs: PoolInputs, workspace: torch.Tensor) -> Call:
    case = inputs.case
    tokens = (case.batch, case.q_len, -1)
    shared: dict[str, Any] = {
        "kv_layout": "NHD",
        "kv_cache_format": _kv_cache_format(case),
        "bmm1_scale": inputs.scale,
    }
    shared["out"] = torch.empty_like(inputs.queries[0])
    lists: list[dict[str, Any]] = [
        {"sparse_indices": swa.indices.view(tokens), "swa_topk_lens": swa.lengths}
        for swa in inputs.swa
    ]
    for extra, keys, arguments in zip(inputs.extra, inputs.extra_keys, lists, strict=False):
        arguments["compressed_kv_cache"] = keys.data
        arguments["extra_sparse_indices"] = extra.indices.view(tokens)
        arguments["extra_sparse_topk_lens"] = extra.lengths

    def call(index: int) -> torch.Tensor:
        out = trtllm_batch_decode_sparse_mla_dsv4(
            inputs.queries[index], inputs.keys[index].data, workspace, **lists[index], **shared
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
        None if keys.scales is None or values.scales is None else (keys.scales, values.scales)
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
            logits_soft_cap=inputs.case.soft_cap or None,
            **shared,
        )
        return cast("torch.Tensor", out)

    return call


def block_indices_of(inputs: Inputs) -> torch.Tensor:
    """Return the blocks ``[kv_heads, tokens, n]`` as vLLM passes them: a transposed view."""
    assert inputs.topk_indices is not None, "the case is sparse"
    return inputs.topk_indices.flatten(0, 1).transpose(0, 1)


def msa_call(decode: Callable[..., Any], inputs: Inputs, indices: torch.Tensor) -> Call:
    """Return the call of ``msa_sparse_decode_attention``, mlagen's or that of another library."""
    queries = [query.flatten(0, 1) for query in inputs.queries]
    pairs = zip(inputs.keys, inputs.values, strict=True)
    caches = [(k.data.transpose(1, 2), v.data.transpose(1, 2)) for k, v in pairs]
    factor = element_scale(inputs.case.kv_dtype)
    shared: dict[str, Any] = {
        "page_table": inputs.block_tables,
        "seqused_k": inputs.seq_lens,
        "seqlen_q": inputs.case.q_len,
        "softmax_scale": inputs.scale,
        "out": torch.empty_like(queries[0]),
    }
    if factor != 1:
        shared |= {"k_global_scale": factor, "v_global_scale": factor}

    def call(index: int) -> torch.Tensor:
        return cast("torch.Tensor", decode(queries[index], *caches[index], indices, **shared))

    return call


def qsa_call(decode: Callable[..., Any], inputs: Inputs) -> Call:
    """Return the call of ``qsa_sparse_paged_attention``, mlagen's or that of another library.

    As in the model, a row ends in three unused indices and the count; the gate multiplies by 1.
    """
    assert inputs.topk_indices is not None, "the case is sparse"
    case, device = inputs.case, inputs.seq_lens.device
    queries = [query.flatten(0, 1) for query in inputs.queries]
    indices = pad(pad(inputs.topk_indices.view(-1, case.top_k), (0, 3), value=-1), (0, 1))
    indices[:, -1] = case.top_k
    requests = torch.arange(case.batch, dtype=torch.int32, device=device)
    tables = (indices, inputs.block_tables, requests.repeat_interleave(case.q_len))
    shared: dict[str, Any] = {
        **dict.fromkeys(("k_scale", "v_scale"), element_scale(case.kv_dtype)),
        "output_gate": torch.full_like(queries[0], 100),
        "out": torch.empty_like(queries[0]),
    }

    def call(index: int) -> torch.Tensor:
        keys, values = inputs.keys[index], inputs.values[index]
        scales = {} if keys.scales is None else {"k_sf": keys.scales, "v_sf": values.scales}
        given = (queries[index], keys.data, values.data, *tables, False)
        return cast("torch.Tensor", decode(*given, **scales, **shared))

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
        qk_rope_head_dim=0 if is_gqa else case.qk_rope_head_dim,
        page_size=case.page_size,
        sparse_mla_top_k=case.top_k + (case.window_left + 1 if case.has_two_pools else 0),
        kv_heads=case.kv_heads if is_gqa else None,
        head_dim=case.head_dim_qk if is_gqa else None,
        head_dim_vo=case.head_dim_vo if case.has_value_dims else None,
        window_left=case.window_left,
        kv_cache_format=_kv_cache_format(case),
        device=device,
    )
    return torch.empty(size, dtype=torch.uint8, device=device)


def _kv_cache_format(case: Case) -> str | None:
    """Return the format of two pools by FlashInfer's name."""
    if not case.has_two_pools:
        return None
    return "fp8" if case.kv_dtype is DType.FP8_DSV4 else str(case.kv_dtype)
