"""MLA decode over top-k indices (DSA) in vLLM: the backend ``MLAGEN_MLA_SPARSE``."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport, max_decode_query_len
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view

from mlagen.integrations.vllm.calls import (
    FP8_DS_MLA,
    DecodeImpl,
    Query,
    latent_of,
    one_token_each,
    per_token,
    scales,
    workspace,
)
from mlagen.integrations.vllm.dense import MlagenMLABackend
from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla as decode


class MlagenSparseMLABackend(MlagenMLABackend):
    """The sparse MLA backend, as vLLM selects and validates it."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        *MlagenMLABackend.supported_kv_cache_dtypes,
        FP8_DS_MLA,
    ]

    @staticmethod
    def get_name() -> str:
        """Return the name that ``--attention-backend`` takes."""
        return "MLAGEN_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[MlagenSparseMLAImpl]:
        """Return the class that computes attention."""
        return MlagenSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[MlagenSparseMLAMetadataBuilder]:
        """Return the class that builds the metadata of a batch."""
        return MlagenSparseMLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return ``kv_lora_rank + qk_rope_head_dim`` of models with an indexer."""
        return [512, 576]

    @classmethod
    def is_sparse(cls) -> bool:
        """Return that the layer has top-k indices."""
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the cache spec with blocks that are whole rows apart, as the indices count."""
        return align_blocks_to_rows(spec, 16)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Return why the combination is not supported, if so."""
        del dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, device_capability
        if kv_cache_dtype == FP8_DS_MLA and head_size != 576:
            return f"{FP8_DS_MLA} has rows of head size 576, not {head_size}"
        return None


class MlagenSparseMLAMetadataBuilder(SparseMLACommonMetadataBuilder[SparseMLACommonMetadata]):
    """The metadata of a batch. There is no host schedule: CTAs read the lengths on the device."""

    metadata_cls = SparseMLACommonMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # The indices of a query token say all that it sees, on a DCP rank too.
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """Return the longest query of a captured batch, whose query lengths may vary."""
        del kv_cache_spec
        return int(max_decode_query_len(vllm_config))


class MlagenSparseMLAImpl(DecodeImpl, SparseMLACommonImpl[SparseMLACommonMetadata]):
    """Every query token attends to the tokens of its top-k indices."""

    def _forward_mqa_kernel(
        self,
        q: Query,
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to rows of the cache: the first ``valid_counts`` of each row of ``topk_indices``.

        Returns the output of each query token, and its LSE, a natural logarithm, where decode
        context parallel needs it.
        """
        del is_decode
        bmm1_scale, bmm2_scale = scales(self, layer, q, kv_cache)
        # An index counts rows from the start of the cache, those of other layers between two
        # blocks of this one included; pages of the common divisor have no row between them.
        rows, rows_per_block = flat_kv_row_view(kv_cache, block_size)
        pages = rows.view(-1, math.gcd(rows_per_block, block_size), rows.shape[-1])
        width = topk_indices.shape[-1]
        return per_token(
            decode(
                one_token_each(q),
                pages,
                workspace(latent_of(q).device),
                self.qk_nope_head_dim,
                self.kv_lora_rank,
                self.qk_rope_head_dim,
                topk_indices.unsqueeze(1),
                valid_counts,
                width,
                sparse_mla_top_k=width,
                bmm1_scale=bmm1_scale,
                bmm2_scale=bmm2_scale,
                return_lse=self.need_to_return_lse_for_decode,
                return_lse_base="basee",
            )
        )
