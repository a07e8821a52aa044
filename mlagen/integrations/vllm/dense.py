"""MLA decode in vLLM: what its backends share, and ``MLAGEN_MLA``, over block tables."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import (
    AttentionType,
)

from mlagen.integrations.servers import follow_batch_invariance
from mlagen.integrations.vllm.warm_up import WARM_UP, MlaGroup, Named
from mlagen.integrations.warm_up import workspace
from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla as decode
from mlagen.models.kernels import PAGE_SIZES
from mlagen.values import require

FP8_DS_MLA = "fp8_ds_mla"  # a dtype of a KV cache


class DecodeImpl:
    """Beside a common implementation of vLLM: what the layers of both backends have in common."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_quant_query_input: bool

    def __init__(self, *args: Any, **layer: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **layer).arguments
        for name in ("alibi_slopes", "sliding_window", "logits_soft_cap", "attn_type"):
            value = given.get(name)
            if value and (name, value) != ("attn_type", AttentionType.DECODER):
                raise NotImplementedError(f"mlagen: {name} is not supported by MLA, got {value!r}")
        super().__init__(*args, **layer)
        WARM_UP.register_warmup()
        # Rows of fp8_ds_mla keep the precision of a 16-bit query, as in vLLM's own backends.
        self.supports_quant_query_input = given["kv_cache_dtype"] != FP8_DS_MLA


# ``[tokens, heads, head_dim_qk]``, or its latent and its RoPE part, which the kernels read apart.
Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def latent_of(query: Query) -> torch.Tensor:
    """Return the latent part of a query, or the query itself."""
    return query[0] if isinstance(query, tuple) else query


def part_of(query: Query, tokens: slice) -> Query:
    """Return some tokens of a query."""
    if isinstance(query, tuple):
        return query[0][tokens], query[1][tokens]
    return query[tokens]


def one_token_each(query: Query) -> Query:
    """Return a query ``[tokens, 1, heads, ...]``, of requests that have one token each."""
    if isinstance(query, tuple):
        return query[0].unsqueeze(1), query[1].unsqueeze(1)
    return query.unsqueeze(1)


def scales(impl: Any, layer: Any, query: Query, kv_cache: torch.Tensor) -> tuple[float, float]:
    """Return ``bmm1_scale`` and ``bmm2_scale``: the scales of a layer, for e4m3 operands only."""
    e4m3, query_dtype = torch.float8_e4m3fn, latent_of(query).dtype
    q_scale = layer._q_scale_float if query_dtype == e4m3 else 1.0  # noqa: SLF001
    k_scale = layer._k_scale_float if kv_cache.dtype == e4m3 else 1.0  # noqa: SLF001
    return impl.scale * q_scale * k_scale, k_scale


def per_token(
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output ``[tokens, heads, kv_lora_rank]``, and an LSE as ``[tokens, heads]``."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    return out.flatten(0, -3), None if lse is None else lse.flatten(0, -2)


@dataclass
class MlagenDecodeMetadata(MLACommonDecodeMetadata):
    """The decode part of a batch, with the offsets of ragged queries."""

    query_start_loc: torch.Tensor
    max_query_len: int


class MlagenMLAMetadataBuilder(MlaGroup, MLACommonMetadataBuilder[MLACommonMetadata]):
    """The metadata of a batch. There is no host schedule: CTAs read the lengths on the device."""

    is_sparse = False
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(
            kv_cache_spec, layer_names, vllm_config, device, supports_dcp_with_varlen=True
        )
        # The causal mask of speculative tokens on a DCP rank needs the global index of its tokens.
        needs_index = self.dcp_world_size > 1 and self.reorder_batch_threshold > 1
        label, tokens = "cp_kv_cache_interleave_size", self.cp_kv_cache_interleave_size
        rule = "1 for speculative tokens with decode context parallel"
        require(not needs_index or tokens == 1, label, rule, tokens)
        self.add_to_warm_up(layer_names)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> MlagenDecodeMetadata:
        del max_seq_len, query_start_loc_cpu, num_decode_tokens
        return MlagenDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_query_len=max_query_len,
        )


class MlagenMLAImpl(DecodeImpl, MLACommonImpl[MLACommonMetadata]):
    """Prefill as vLLM's common implementation has it, decode by mlagen."""

    def forward_mqa(
        self,
        q: Query,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode one or more query tokens of each request.

        Returns the output of each query token, and its LSE, a natural logarithm, where decode
        context parallel needs it.
        """
        meta = attn_metadata.decode
        latent = latent_of(q)
        bmm1_scale, bmm2_scale = scales(self, layer, q, kv_c_and_k_pe_cache)
        keywords: dict[str, Any] = {}
        # The bound, not the average: a captured batch is replayed with any lengths up to it.
        if meta.max_query_len > 1 or len(latent) != len(meta.seq_lens):
            keywords["cum_seq_lens_q"] = meta.query_start_loc
            keywords["max_q_len"] = meta.max_query_len
            keywords |= self._dcp_keywords(meta)
        else:
            q = one_token_each(q)
        return per_token(
            decode(
                q,
                kv_c_and_k_pe_cache,
                workspace(latent.device),
                self.qk_nope_head_dim,
                self.kv_lora_rank,
                self.qk_rope_head_dim,
                meta.block_table,
                meta.seq_lens,
                attn_metadata.max_seq_len,
                bmm1_scale=bmm1_scale,
                bmm2_scale=bmm2_scale,
                return_lse=self.need_to_return_lse_for_decode,
                return_lse_base="basee",
                **keywords,
            )
        )

    def _dcp_keywords(self, meta: MlagenDecodeMetadata) -> dict[str, Any]:
        # One query token attends to all tokens of its rank; several need the causal mask of all.
        if self.dcp_world_size == 1:
            return {}
        return {
            "enable_dcp": True,
            "cp_world": self.dcp_world_size,
            "cp_rank": self.dcp_rank,
            "causal_seqlens_kv_global": meta.dcp_tot_seq_lens,
        }


class MlagenMLABackend(Named, MLACommonBackend):
    """The dense MLA backend, as vLLM selects and validates it."""

    name = "MLAGEN_MLA"
    impl = MlagenMLAImpl
    builder = MlagenMLAMetadataBuilder

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
    ]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the tokens of a KV block of the kernels, where the user names no page size."""
        del default_block_size
        return max(PAGE_SIZES)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return ``kv_lora_rank + qk_rope_head_dim`` of the kernels."""
        return [320, 512, 576]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether mlagen has a kernel; the sm90 kernels need 9.0."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return whether decode is batch-invariant, as with ``VLLM_BATCH_INVARIANT=1``."""
        return follow_batch_invariance(envs.VLLM_BATCH_INVARIANT)
