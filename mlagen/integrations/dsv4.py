"""DeepSeek-V4 in servers: what replaces FlashMLA's decode in their layers."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.integrations.warm_up import workspace
from mlagen.mla import trtllm_batch_decode_sparse_mla_dsv4 as decode
from mlagen.spec.dtype import DType
from mlagen.spec.mla.variant import MlaVariant

ROW_BYTES = 584  # the only ones that servers store on an H100 or H200, of V4 and V4.1

_DIM = 512  # of a head and of a token


def flash_mla_with_kvcache(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: None,
    cache_seqlens: None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    is_fp8_kvcache: bool,
    indices: torch.Tensor,
    topk_length: torch.Tensor,
    softmax_scale: float,
    attn_sink: torch.Tensor,
    extra_k_cache: torch.Tensor | None,
    extra_indices_in_kvcache: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    out: torch.Tensor,
) -> tuple[torch.Tensor, None]:
    """Attend as FlashMLA's function of that name does over these rows, with any number of heads.

    The sinks of heads that ``q`` has no more, those of padding, are not read. Nothing is planned,
    so ``tile_scheduler_metadata`` stays empty, and no server reads the LSE.
    """
    del block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, is_fp8_kvcache
    decode(
        q.squeeze(1),
        k_cache.view(torch.uint8),
        workspace(q.device),
        indices,
        None if extra_k_cache is None else extra_k_cache.view(torch.uint8),
        out=out.squeeze(1),
        bmm1_scale=softmax_scale,
        sinks=attn_sink[: q.shape[-2]],
        kv_layout="NHD",
        swa_topk_lens=topk_length,
        extra_sparse_indices=extra_indices_in_kvcache,
        extra_sparse_topk_lens=extra_topk_length,
    )
    return out, None


def padded_output(like: torch.Tensor, tokens: int, heads: int, padded_heads: int) -> torch.Tensor:
    """Return an output ``[tokens, padded_heads, 512]`` whose real heads are contiguous.

    So kernels write them in place: the heads that pad a token are those of the next one.
    """
    memory = like.new_empty((tokens * heads + padded_heads - heads) * _DIM)
    return memory.as_strided((tokens, padded_heads, _DIM), (heads * _DIM, _DIM, 1))


def dsv4_calls(heads: int) -> list[tuple[MlaVariant, int]]:
    """Return the decode calls of layers with so many heads on a rank.

    They are one for all layers: lists of any width, and pages of any size, take the same kernels,
    and each query token is a sequence.
    """
    variant = MlaVariant(
        query_dtype=DType.BF16,
        kv_dtype=DType.FP8_DSV4,
        kv_lora_rank=_DIM,
        qk_rope_head_dim=0,
        page_size=0,
        lookup="two_pools",
    )
    return [(variant, heads)]
