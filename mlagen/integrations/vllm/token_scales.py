"""GQA over a cache with a scale for each token and KV head.

It is vLLM's Triton backend, which writes such caches: a row has a key, its scale, the value and its
scale. Batches of decode run mlagen's kernels, and batches with a longer query stay with Triton.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVQuantMode

from mlagen.integrations.vllm.decode_batches import DecodeBatches, DecodeBatchesBuilder, Sm90Backend
from mlagen.spec.dtype import DType

_WITH_SCALES = {
    KVQuantMode.INT8_PER_TOKEN_HEAD: DType.INT8_PER_TOKEN_HEAD,
    KVQuantMode.FP8_PER_TOKEN_HEAD: DType.FP8_PER_TOKEN_HEAD,
}


class MlagenTokenScalesMetadataBuilder(DecodeBatchesBuilder, TritonAttentionMetadataBuilder):
    """Triton's builder."""

    @property
    def kv_dtype(self) -> torch.dtype | DType:
        """The dtype of the cache."""
        dtype: torch.dtype = self.kv_cache_spec.dtype
        return _WITH_SCALES.get(self.kv_cache_spec.kv_quant_mode, dtype)


class MlagenTokenScalesImpl(DecodeBatches, TritonAttentionImpl):
    """Triton's implementation, with a decode of its own."""

    def cache_of(self, layer: Any, kv_cache: torch.Tensor, query: torch.Tensor) -> dict[str, Any]:
        """Return keys and values, and their scales if there are any."""
        del layer, query
        if not self._is_per_token_head_quant:
            pages = canonicalize_singleton_dim_strides(kv_cache)
            both = pages.split(self.head_size, dim=-1)
            return {"kv_cache": both, "bmm1_scale": self.scale, "kv_layout": "HND"}
        rows = self._pth_key_value_caches(kv_cache)
        return {
            "kv_cache": tuple(row[..., : self.head_size] for row in rows),
            "kv_cache_sf": (self._k_scale_cache, self._v_scale_cache),
            "bmm1_scale": self.scale,
        }


class MlagenTokenScalesBackend(Sm90Backend, TritonAttentionBackend):
    """The backend; layers that vLLM excludes from quantization have a cache of 16 bits."""

    name = "MLAGEN_GQA_TOKEN_SCALES"
    impl = MlagenTokenScalesImpl
    builder = MlagenTokenScalesMetadataBuilder

    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        *("auto", "float16", "bfloat16", "int8_per_token_head", "fp8_per_token_head")
    ]
