"""Classes in place of vLLM's FlashInfer backend, with its call of XQA."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from tests.integrations.vllm.stand_in_base import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
)


class FlashInferDecodeKernel(Enum):
    """The decode kernel of a FlashInfer batch."""

    XQA = "xqa"
    TRTLLM_GEN = "trtllm-gen"


@dataclass
class FlashInferTrtllmAPIDecode:
    """The decode part of a FlashInfer batch."""

    kernel: FlashInferDecodeKernel
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    q_len_per_req: int = 1
    q_cu_seq_lens: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    dcp_query_start_loc: torch.Tensor | None = None


@dataclass
class FlashInferMetadata:
    """A FlashInfer batch."""

    kv_cache_layout: Any
    num_actual_tokens: int
    slot_mapping: torch.Tensor
    q_data_type_prefill: torch.dtype
    q_data_type_decode: torch.dtype
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    causal: bool
    prefill: Any
    decode: Any


class KVCacheLayout(Enum):
    """The order of the axes of a cache: layers, blocks, heads, tokens, elements."""

    LBHNC = (0, 1, 2, 3, 4)

    @property
    def layer_view_order(self) -> tuple[int, ...]:
        """The order of the axes of a layer's view."""
        return (0, 1, 2, 3)


def get_flashinfer_layout_string(layout: KVCacheLayout) -> str:
    """Return the layout in FlashInfer's words."""
    return {"LBHNC": "HND"}[layout.name]


def is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    """Return whether a cache has scales."""
    return kv_cache_dtype.startswith("fp8")


def canonicalize_singleton_dim_strides(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has no degenerate strides."""
    return t


def force_use_trtllm_attention() -> bool | None:
    """Return the option of the engine."""
    return None


def supports_trtllm_attention(is_prefill: bool = False) -> bool:
    """Fail, as a look-up of cubins does without a network."""
    del is_prefill
    raise OSError("the network was asked")


def can_use_trtllm_attention(
    num_qo_heads: int, num_kv_heads: int, is_prefill: bool = False
) -> bool:
    """Fail, as a look-up of cubins does without a network."""
    del num_qo_heads, num_kv_heads
    return supports_trtllm_attention(is_prefill)


class FlashInferBackend(AttentionBackend):
    """The GQA backend of FlashInfer."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return page sizes."""
        del kv_cache_spec
        return [16, 32, 64]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return head sizes."""
        return [64, 128, 256, 512]

    @classmethod
    def supports_sink(cls) -> bool:
        """Return whether it serves sinks."""
        return supports_trtllm_attention(is_prefill=False)


class FlashInferMetadataBuilder(AttentionMetadataBuilder[FlashInferMetadata]):
    """The builder of FlashInfer batches, with its choice of XQA."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        del layer_names, device
        self.vllm_config = vllm_config
        self.attention_config = vllm_config.attention_config
        self.use_dcp = False
        self.use_xqa = can_use_trtllm_attention(8, kv_cache_spec.num_kv_heads, is_prefill=False)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return which batches a CUDA graph may hold."""
        del vllm_config
        if can_use_trtllm_attention(num_qo_heads=8, num_kv_heads=kv_cache_spec.num_kv_heads):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class FlashInferImpl:
    """The implementation of GQA, of which the plugin takes prefill and scales."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        del alibi_slopes, logits_soft_cap, attn_type, kv_sharing_target_layer_name
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.kv_cache_dtype, self.sinks = scale, kv_cache_dtype, sinks
        self.window_left = -1 if sliding_window is None else sliding_window - 1
        self.supports_xqa_or_trtllm_gen_decode = can_use_trtllm_attention(num_heads, num_kv_heads)

    def get_xqa_bmm1_scale(self, layer: Any, q_data_type: torch.dtype) -> float:
        """Return the scale of the scores."""
        del q_data_type
        is_quantized = is_quantized_kv_cache(self.kv_cache_dtype)
        return float(self.scale * (layer._k_scale_float if is_quantized else 1.0))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write zeros for a profiling run, and ones for prefills, which need a GPU."""
        del layer, query, key, value, kv_cache, output_scale, output_block_scale
        if attn_metadata is None:
            return output.fill_(0)
        assert attn_metadata.decode is None, "XQA was called"
        assert len(output) == attn_metadata.num_actual_tokens == attn_metadata.num_prefill_tokens
        return output.fill_(1)
