"""Functions that FlashInfer's tests call below its entry points, by the entry points of mlagen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mlagen.mla

_V32_DIM = 576  # of queries over rows of fp8_ds_mla


class BatchMlaWrapper(mlagen.mla.BatchMLAPagedAttentionWrapper):
    """The wrapper with what only the branch has that FlashInfer 0.7 was made from."""

    @property
    def resolved_backend(self) -> str:
        """The name of the backend, as it was given."""
        return self._backend

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Plan without the two hints of the branch."""
        for hint in ("qk_nope_head_dim", "is_var_seq"):
            kwargs.pop(hint, None)
        super().plan(*args, **kwargs)


def cute_dsl_mla_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    softmax_scale: float,
    output_scale: float = 1.0,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    return_lse: bool = False,
    **others: Any,
) -> Any:
    """Decode by the entry point that has this backend; the LSE is natural, in the query's shape."""
    if out is None and out_dtype is not None:
        out = query.new_empty(*query.shape[:-1], kv_lora_rank, dtype=out_dtype)
    result: Any = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
        query=query,
        kv_cache=kv_cache,
        workspace_buffer=workspace_buffer,
        qk_nope_head_dim=128,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        out=out,
        bmm1_scale=softmax_scale,
        bmm2_scale=output_scale,
        backend="cute-dsl",
        return_lse=return_lse,
        return_lse_base="basee",
        **others,
    )
    if not return_lse:
        return result
    return result[0], result[1] if "lse" in others else result[1].view(query.shape[:-1])


def sparse_mla_paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    output: torch.Tensor,
    out_lse: torch.Tensor,
    sm_scale: float,
    *,
    d_v: int = 512,
    kv_scale_format: str = "auto",
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """Decode rows of fp8_ds_mla; a test of other rows, or of two caches, is skipped."""
    if q.shape[-1] != _V32_DIM or extra_kv_cache is not None:
        pytest.skip("rows of DeepSeek-V4: no part of mlagen")
    top_k = indices.shape[-1]
    mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
        query=q[:, None],
        kv_cache=kv_cache,
        workspace_buffer=torch.empty(128 << 20, dtype=torch.uint8, device=q.device),
        qk_nope_head_dim=128,
        kv_lora_rank=d_v,
        qk_rope_head_dim=_V32_DIM - d_v,
        block_tables=indices.view(-1, 1, top_k),
        seq_lens=indices.new_full((len(q),), top_k) if topk_length is None else topk_length,
        max_seq_len=top_k,
        sparse_mla_top_k=top_k,
        out=output[:, None],
        lse=out_lse,
        return_lse=True,
        return_lse_base="base2",
        bmm1_scale=sm_scale,
        sinks=attn_sink,
        backend="sparse",
        kv_scale_format=kv_scale_format,
    )
