"""FlashInfer: its MLA wrapper, and XQA, its wrapper, MSA and QSA for grouped-query attention."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.spec.dtype import DType

from ..calls import Call, block_indices_of, msa_call, qsa_call
from ..cases import KV_LORA_RANK, Case
from ..inputs import TORCH_DTYPES, Inputs
from .baseline import (
    Baseline,
    block_table_of,
    cu_seqlens_q_of,
    has_16bit_query,
    version_of,
    with_topk_as_tables,
)

PACKAGES = "flashinfer-python"
INSTALL = "pip install flashinfer-python"

# FlashInfer does not report the size it needs; XQA's first 8 MiB are zeroed semaphores.
_WORKSPACE_BYTES = 256 << 20

_MAX_XQA_HEAD_DIM = 256
_HEAD_DIMS = (64, 128, 256, 512)  # of the wrapper
_MSA_HEAD_DIM, _QSA_HEAD_DIM = 128, 256
_NVFP4_HEAD_DIMS = (128, 256, 512)


def find() -> list[Baseline]:
    """Return FlashInfer, if it is found."""
    found = version_of(PACKAGES)
    if found is None:
        return []
    return [Baseline(name="flashinfer", version=found, serves=_serves, make=flashinfer_call)]


def _serves(case: Case) -> bool:
    if case.sparse_block > 1:  # on sm_90
        has_shape = case.top_k == 16 * case.sparse_block and case.head_dim_qk == _MSA_HEAD_DIM
        has_group = case.heads <= 16 * case.kv_heads
        return (case.dtype, case.kv_dtype) == (DType.BF16, DType.E4M3) and has_shape and has_group
    if case.is_sparse_gqa:
        is_known = case.kv_dtype in {DType.BF16, DType.E4M3, DType.NVFP4}
        return case.dtype is DType.BF16 and is_known and case.head_dim_qk == _QSA_HEAD_DIM
    if case.has_value_dims:
        return False
    if _takes_wrapper(case):
        # Its FA2 kernels misread NVFP4 of 64 dims, and take several query tokens as prefill does.
        is_nvfp4 = case.kv_dtype is DType.NVFP4
        dims = _NVFP4_HEAD_DIMS if is_nvfp4 else _HEAD_DIMS
        has_dtypes = has_16bit_query(case) or (is_nvfp4 and case.dtype.is_16bit)
        return has_dtypes and case.q_len == 1 and case.head_dim_qk in dims
    return has_16bit_query(case) or (case.dtype, case.kv_dtype) == (DType.BF16, DType.E4M3)


def _takes_wrapper(case: Case) -> bool:
    """Whether XQA has no kernel on sm_90."""
    has_no_kernel = case.kv_dtype is DType.NVFP4 or case.head_dim_qk > _MAX_XQA_HEAD_DIM
    return case.family == "gqa" and (has_no_kernel or case.soft_cap > 0)


def flashinfer_call(inputs: Inputs) -> Call:
    """Return FlashInfer's call for the case; it may reject it here or when called.

    The wrapper is planned here; a call is only its run.
    """
    if inputs.case.is_sparse_gqa:
        return _sparse_call(inputs)
    device = inputs.seq_lens.device
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    if inputs.case.family == "mla":
        return _mla_call(inputs, workspace)
    make = _wrapper_call if _takes_wrapper(inputs.case) else _xqa_call
    return make(inputs, workspace)


def _sparse_call(inputs: Inputs) -> Call:
    if inputs.case.sparse_block == 1:
        from flashinfer.sparse import qsa_sparse_paged_attention

        return qsa_call(qsa_sparse_paged_attention, inputs)
    from flashinfer.msa_ops import msa_sparse_decode_attention

    indices = block_indices_of(inputs).sort(-1).values.contiguous()  # ascending
    return msa_call(msa_sparse_decode_attention, inputs, indices)


def _mla_call(inputs: Inputs, workspace: torch.Tensor) -> Call:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    inputs = with_topk_as_tables(inputs)
    case, device = inputs.case, inputs.seq_lens.device
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    wrapper.plan(
        cu_seqlens_q_of(inputs),
        torch.tensor([0, *inputs.pages], device=device).cumsum(0).int(),
        block_table_of(inputs),
        inputs.seq_lens,
        case.heads,
        KV_LORA_RANK,
        case.qk_rope_head_dim,
        case.page_size,
        case.q_len > 1,
        inputs.scale,
        TORCH_DTYPES[case.dtype],
        TORCH_DTYPES[case.kv_dtype],
    )
    queries = [_split_rope(query.flatten(0, 1)) for query in inputs.queries]
    caches = [_split_rope(keys.data.squeeze(2)) for keys in inputs.keys]
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if case.kv_dtype is DType.E4M3 else {}

    def call(index: int) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(*queries[index], *caches[index], **scales)
        return out

    return call


def _split_rope(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor[..., :KV_LORA_RANK], tensor[..., KV_LORA_RANK:]


def _wrapper_call(inputs: Inputs, workspace: torch.Tensor) -> Call:
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    case, device = inputs.case, inputs.seq_lens.device
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=True, backend="fa2"
    )
    wrapper.plan(
        torch.tensor([0, *inputs.pages], device=device).cumsum(0).int(),
        block_table_of(inputs),
        (inputs.seq_lens - 1) % case.page_size + 1,
        case.heads,
        case.kv_heads,
        case.head_dim_qk,
        case.page_size,
        window_left=case.window_left,
        logits_soft_cap=float(case.soft_cap) or None,
        q_data_type=TORCH_DTYPES[case.dtype],
        kv_data_type=inputs.keys[0].data.dtype,
        sm_scale=inputs.scale,
    )
    queries = [query.flatten(0, 1) for query in inputs.queries]
    pairs = list(zip(inputs.keys, inputs.values, strict=True))
    scales: list[dict[str, Any]] = [
        {} if keys.scales is None else {"kv_cache_sf": (keys.scales, values.scales)}
        for keys, values in pairs
    ]

    def call(index: int) -> torch.Tensor:
        keys, values = pairs[index]
        out: torch.Tensor = wrapper.run(queries[index], (keys.data, values.data), **scales[index])
        return out

    return call


def _xqa_call(inputs: Inputs, workspace: torch.Tensor) -> Call:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    queries = [query.flatten(0, 1) for query in inputs.queries]
    lengths = inputs.seq_lens.to(torch.uint32)
    q_len = inputs.case.q_len
    drafts = {} if q_len == 1 else {"q_len_per_req": q_len, "mask": _causal_mask(inputs)}

    def call(index: int) -> torch.Tensor:
        out: torch.Tensor = xqa_batch_decode_with_kv_cache(
            queries[index],
            (inputs.keys[index].data, inputs.values[index].data),
            workspace,
            inputs.block_tables,
            lengths,
            inputs.max_seq_len,
            bmm1_scale=inputs.scale,
            bmm2_scale=1.0,
            window_left=inputs.case.window_left,
            kv_layout="NHD",
            **drafts,
        )
        return out

    return call


def _causal_mask(inputs: Inputs) -> torch.Tensor:
    """Return uint16 words ``[batch, q_len, words]``: bit ``j`` of row ``i`` is ``j <= i``."""
    case = inputs.case
    words = -(-case.q_len // 32) * 2
    rows = [(2 << row) - 1 for row in range(case.q_len)]
    numbers = [[row >> 16 * word & 0xFFFF for word in range(words)] for row in rows]
    mask = torch.tensor(numbers, dtype=torch.int32).to(torch.uint16)
    return mask.expand(case.batch, -1, -1).contiguous().to(inputs.seq_lens.device)
