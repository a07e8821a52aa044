"""GQA whose values have fewer dims than its keys: MiMo-V2.

It is vLLM's FlashAttention backend for such caches, whose pages have a key and its value in a row.
Batches of decode run mlagen's kernels, and batches with a longer query stay with FlashAttention.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.flash_attn_diffkv import (
    FlashAttentionDiffKVBackend,
    FlashAttentionDiffKVImpl,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from mlagen.integrations.vllm.decode_batches import DecodeBatches, DecodeBatchesBuilder, Sm90Backend


class MlagenDiffKVMetadataBuilder(DecodeBatchesBuilder, FlashAttentionMetadataBuilder):
    """FlashAttention's builder."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of the cache."""
        is_quantized = is_quantized_kv_cache(self.cache_config.cache_dtype)
        return torch.float8_e4m3fn if is_quantized else self.model_config.dtype


class MlagenDiffKVImpl(DecodeBatches, FlashAttentionDiffKVImpl):
    """FlashAttention's implementation, with a decode of its own."""

    def cache_of(self, layer: Any, kv_cache: torch.Tensor, query: torch.Tensor) -> dict[str, Any]:
        """Return keys and values, and the scales of a call."""
        bmm1_scale, bmm2_scale = self.scale, 1.0
        if is_quantized_kv_cache(self.kv_cache_dtype):
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
            bmm1_scale *= layer._k_scale_float  # noqa: SLF001
            bmm2_scale = layer._v_scale_float  # noqa: SLF001
            if query.element_size() == 1:  # vLLM quantizes it for FlashAttention
                bmm1_scale *= layer._q_scale_float  # noqa: SLF001
        pages = canonicalize_singleton_dim_strides(kv_cache)
        return {
            "kv_cache": (pages[..., : self.head_size], pages[..., self.head_size :]),
            "bmm1_scale": bmm1_scale,
            "bmm2_scale": bmm2_scale,
            "kv_layout": "HND",
        }


class MlagenDiffKVBackend(Sm90Backend, FlashAttentionDiffKVBackend):
    """The backend, which vLLM's MiMo-V2 takes by the end of its name."""

    name = "MLAGEN_GQA_DIFFKV"
    impl = MlagenDiffKVImpl
    builder = MlagenDiffKVMetadataBuilder

    @classmethod
    def set_head_size_v(cls, head_size_v: int) -> None:
        """Set the dims of a value, which FlashAttention's class reads of itself."""
        FlashAttentionDiffKVBackend.set_head_size_v(head_size_v)
