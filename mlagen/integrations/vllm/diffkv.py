"""GQA whose values have fewer dims than its keys: MiMo-V2.

It is vLLM's FlashAttention backend for such caches, whose pages have a key and its value in a row.
Batches of decode run mlagen's kernels, and batches with a longer query stay with FlashAttention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport, max_decode_query_len
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.flash_attn_diffkv import (
    FlashAttentionDiffKVBackend,
    FlashAttentionDiffKVImpl,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from mlagen.decode import trtllm_batch_decode_with_kv_cache as decode
from mlagen.integrations.vllm.warm_up import WARM_UP
from mlagen.integrations.warm_up import Calls, gqa_calls, workspace
from mlagen.models.kernels import PAGE_SIZES


class MlagenDiffKVBackend(FlashAttentionDiffKVBackend):
    """The backend, which vLLM's MiMo-V2 takes by the end of its name."""

    @staticmethod
    def get_name() -> str:
        """Return the name that ``--attention-backend`` takes."""
        return "MLAGEN_GQA_DIFFKV"

    @staticmethod
    def get_impl_cls() -> type[MlagenDiffKVImpl]:
        """Return the class that computes attention."""
        return MlagenDiffKVImpl

    @staticmethod
    def get_builder_cls() -> type[MlagenDiffKVMetadataBuilder]:
        """Return the class that builds the metadata of a batch."""
        return MlagenDiffKVMetadataBuilder

    @classmethod
    def set_head_size_v(cls, head_size_v: int) -> None:
        """Set the dims of a value, which FlashAttention's class reads of itself."""
        FlashAttentionDiffKVBackend.set_head_size_v(head_size_v)

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Return the page sizes that prewarming compiles, into which vLLM splits larger blocks."""
        del kv_cache_spec
        return list(PAGE_SIZES)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether FlashAttention has such heads on this GPU, and mlagen an sm90 kernel."""
        return (capability.major, capability.minor) == (9, 0)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return that it is not: FlashAttention serves a batch with a prompt."""
        return False


class MlagenDiffKVMetadataBuilder(FlashAttentionMetadataBuilder):
    """FlashAttention's builder, whose full graphs hold batches of decode alone."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.head_dim_vo = kv_cache_spec.head_size_v
        WARM_UP.add(self)

    def decode_calls(self) -> Iterable[Calls]:
        """Return the calls of mlagen that decode the batches of the group."""
        model_dtype = self.model_config.dtype
        is_quantized = is_quantized_kv_cache(self.cache_config.cache_dtype)
        return gqa_calls(
            heads=self.num_heads_q,
            kv_heads=self.num_heads_kv,
            head_dim=self.headdim,
            head_dim_vo=self.head_dim_vo,
            page_size=self.block_size,
            query_dtype=model_dtype,
            kv_dtype=torch.float8_e4m3fn if is_quantized else model_dtype,
            max_q_len=max_decode_query_len(self.vllm_config),
        )

    def warm_up_prefill(self) -> None:
        """Leave the prefill to vLLM."""


class MlagenDiffKVImpl(FlashAttentionDiffKVImpl):
    """FlashAttention's implementation, with a decode of its own."""

    def __init__(self, *args: Any, **layer: Any) -> None:
        super().__init__(*args, **layer)
        unserved = {"alibi_slopes": self.alibi_slopes, "logits_soft_cap": self.logits_soft_cap}
        for name, value in unserved.items():
            if value is not None and (name, value) != ("logits_soft_cap", 0):
                got = f"not supported with values of their own dims, got {value!r}"
                raise NotImplementedError(f"mlagen: {name} is {got}")
        config = get_current_vllm_config_or_none()
        self.max_q_len = 1 if config is None else max_decode_query_len(config)
        WARM_UP.register_warmup()

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the cache: a batch of decode by mlagen, any other as the base."""
        is_decode = (
            attn_metadata is not None  # or a profiling run
            and attn_metadata.max_query_len <= self.max_q_len
            and attn_metadata.causal is True
            and self.dcp_world_size == 1
            and output_scale is None
        )
        if is_decode:
            self._decode(layer, query, kv_cache, attn_metadata, output)
            return output
        scales = (output_scale, output_block_scale)
        out: torch.Tensor = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *scales
        )
        return out

    def _decode(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, batch: Any, out: torch.Tensor
    ) -> None:
        """Write the output of a batch, whose requests have one query token or a few."""
        # A request of one token that pads a captured batch has a row too.
        q_len, tokens, ragged = batch.max_query_len, len(batch.seq_lens), {}
        if q_len > 1:
            tokens = batch.num_actual_tokens
            ragged = {"cum_seq_lens_q": batch.query_start_loc, "max_q_len": q_len}
        bmm1_scale, bmm2_scale = self.scale, 1.0
        if is_quantized_kv_cache(self.kv_cache_dtype):
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
            bmm1_scale *= layer._k_scale_float  # noqa: SLF001
            bmm2_scale = layer._v_scale_float  # noqa: SLF001
            if query.element_size() == 1:  # vLLM quantizes it for FlashAttention
                bmm1_scale *= layer._q_scale_float  # noqa: SLF001
        pages = canonicalize_singleton_dim_strides(kv_cache)
        decode(
            query[:tokens],
            (pages[..., : self.head_size], pages[..., self.head_size :]),
            workspace(query.device),
            batch.block_table,
            batch.seq_lens,
            batch.max_seq_len,
            bmm1_scale,
            bmm2_scale,
            self.sliding_window[0],
            out[:tokens],
            sinks=self.sinks,
            kv_layout="HND",
            **ragged,
        )
