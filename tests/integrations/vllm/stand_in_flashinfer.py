"""Classes in place of vLLM's FlashInfer backend, with its call of XQA."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any

import torch

from tests.integrations.vllm.stand_in_base import AttentionBackend, MultipleOf


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


class FlashInferBackend(AttentionBackend):
    """The GQA backend of FlashInfer."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return page sizes."""
        del kv_cache_spec
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return head sizes."""
        return [64, 128, 256, 512]


class FlashInferImpl:
    """The implementation of GQA; its XQA call is vLLM's, with what start-up sets."""

    head_size: int
    scale: float
    sinks: torch.Tensor | None
    window_left: int

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
        """Call XQA by the name that the module has now."""
        del layer, key, value, output_scale, output_block_scale
        module = import_module("vllm.v1.attention.backends.flashinfer")
        tokens = attn_metadata.num_decode_tokens
        module.flashinfer_xqa_batch_decode_with_kv_cache(
            query=query[:tokens],
            kv_cache=kv_cache.chunk(2, dim=-1),
            kv_cache_sf=None,
            workspace_buffer=torch.empty(1 << 20, dtype=torch.uint8),
            block_tables=attn_metadata.decode.block_tables,
            seq_lens=attn_metadata.decode.seq_lens,
            max_seq_len=attn_metadata.decode.max_seq_len,
            bmm1_scale=self.scale,
            bmm2_scale=1.0,
            window_left=self.window_left,
            out=output[:tokens],
            sinks=self.sinks,
            kv_layout="HND",
            q_len_per_req=attn_metadata.decode.q_len_per_req,
            mask=attn_metadata.decode.mask,
            q_cu_seq_lens=attn_metadata.decode.q_cu_seq_lens,
        )
        return output


def flashinfer_xqa_batch_decode_with_kv_cache(**_: Any) -> None:
    """Fail, as XQA does without a GPU."""
    raise RuntimeError("XQA was called")
