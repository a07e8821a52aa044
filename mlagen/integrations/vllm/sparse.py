"""MLA decode over top-k indices (DSA) in vLLM: the backend ``MLAGEN_MLA_SPARSE``.

The query tokens of a long prefill read each row many times, and the kernel of FP8 rows converts it
each time. So ``fp8_ds_mla`` rows are converted to bf16 once, for the kernel of bf16 rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.sparse_utils import (
    align_blocks_to_rows,
    flat_kv_row_view,
    triton_convert_req_index_to_global_index,
)

from mlagen.integrations.vllm.dense import (
    FP8_DS_MLA,
    DecodeImpl,
    MlagenMLABackend,
    Query,
    latent_of,
    one_token_each,
    part_of,
    per_token,
    scales,
)
from mlagen.integrations.vllm.warm_up import MlaGroup
from mlagen.integrations.warm_up import workspace
from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla as decode
from mlagen.models.kernels import CONVERSION_MIN_HEADS, PAGE_SIZES, page_size_of
from mlagen.spec.dtype import DType
from mlagen.spec.mla.variant import MlaVariant

# From these query tokens on the conversion pays, on an H200: docs/explanation/performance.md.
MIN_TOKENS = 1024
PAGE_SIZE = max(PAGE_SIZES)  # of converted rows
_WIDTH = 576  # of a converted row


@dataclass
class Conversion:
    """The prefills of a batch, whose rows follow each other in a workspace."""

    workspace: torch.Tensor
    num_rows: int
    block_table: torch.Tensor
    starts: torch.Tensor  # in the workspace, of each request
    request_ids: torch.Tensor  # of each query token

    def attend(
        self,
        impl: Any,
        q: Query,
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        block_size: int,
        out: torch.Tensor,
    ) -> None:
        """Write the output of query tokens, whose indices count the tokens of their requests."""
        ops.cp_gather_and_upconvert_fp8_kv_cache(
            kv_cache,
            self.workspace[: self.num_rows],
            self.block_table,
            self.starts,
            len(self.block_table),
        )
        indices, valid_counts = triton_convert_req_index_to_global_index(
            self.request_ids,
            self.block_table,
            topk_indices,
            BLOCK_SIZE=block_size,
            NUM_TOPK_TOKENS=topk_indices.shape[-1],
            HAS_PREFILL_WORKSPACE=True,
            prefill_workspace_request_ids=self.request_ids,
            prefill_workspace_starts=self.starts,
            return_valid_counts=True,
        )
        num_pages = -(-self.num_rows // PAGE_SIZE)
        pages = self.workspace[: num_pages * PAGE_SIZE].view(num_pages, PAGE_SIZE, _WIDTH)
        keywords = {"bmm1_scale": impl.scale, "out": out.unsqueeze(1)}
        attend(impl, q, pages, indices, valid_counts, **keywords)


def attend(
    impl: Any,
    q: Query,
    pages: torch.Tensor,
    indices: torch.Tensor,
    valid_counts: torch.Tensor,
    **keywords: Any,
) -> Any:
    """Attend to rows of pages: the first ``valid_counts`` of each row of ``indices``."""
    width = indices.shape[-1]
    return decode(
        one_token_each(q),
        pages,
        workspace(latent_of(q).device),
        impl.qk_nope_head_dim,
        impl.kv_lora_rank,
        impl.qk_rope_head_dim,
        indices.unsqueeze(1),
        valid_counts,
        width,
        sparse_mla_top_k=width,
        **keywords,
    )


def can_convert(builder: Any, heads: int, kv_cache_dtype: str) -> bool:
    """Return whether prefills of layers with so many heads may be converted."""
    space = builder.chunked_prefill_workspace
    return (
        kv_cache_dtype == FP8_DS_MLA
        and heads >= CONVERSION_MIN_HEADS
        and builder.dcp_world_size == 1
        and space.dtype == torch.bfloat16
        and space.shape[-1] == _WIDTH
        and builder.vllm_config.attention_config.hisparse_config is None
        and not envs.VLLM_BATCH_INVARIANT  # it depends on the batch
    )


def conversion_of(builder: Any, batch: Any, metadata: Any) -> Conversion | None:
    """Return the conversion of a batch, if it has enough query tokens and rows that fit.

    The workspace is that of the dense prefill, which such a batch does not have.
    """
    count = metadata.num_prefills
    first = metadata.num_reqs - count
    tokens = slice(metadata.num_decode_tokens, metadata.num_actual_tokens)
    if not count or tokens.stop - tokens.start < MIN_TOKENS:
        return None
    if metadata.prefill is not None and metadata.prefill.use_dense_mha:
        return None
    num_rows = int(batch.seq_lens_cpu_upper_bound[first : first + count].sum())
    space = builder.chunked_prefill_workspace
    if num_rows > len(space) // PAGE_SIZE * PAGE_SIZE:
        return None
    lengths = metadata.seq_lens[first : first + count]
    return Conversion(
        workspace=space,
        num_rows=num_rows,
        block_table=metadata.block_table[first : first + count],
        starts=(lengths.cumsum(0) - lengths).int(),
        request_ids=metadata.req_id_per_token[tokens] - first,
    )


@dataclass(kw_only=True)
class MlagenSparseMLAMetadata(SparseMLACommonMetadata):
    """A batch, with the conversion of its prefills to bf16, if it pays."""

    conversion: Conversion | None = None


class MlagenSparseMLAMetadataBuilder(
    MlaGroup, SparseMLACommonMetadataBuilder[MlagenSparseMLAMetadata]
):
    """The metadata of a batch. There is no host schedule: CTAs read the lengths on the device."""

    is_sparse = True
    metadata_cls = MlagenSparseMLAMetadata

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # The indices of a query token name all that it attends to, on a DCP rank too.
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )
        self.add_to_warm_up(layer_names)

    @cached_property
    def converts(self) -> bool:
        """Whether prefills may be converted."""
        impl = self.layers[0].impl
        return can_convert(self, impl.num_heads, impl.kv_cache_dtype)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> MlagenSparseMLAMetadata:
        """Return the metadata of a batch."""
        metadata: MlagenSparseMLAMetadata = super().build(
            common_prefix_len, common_attn_metadata, fast_build
        )
        if self.converts:
            metadata.conversion = conversion_of(self, common_attn_metadata, metadata)
        return metadata

    def decode_calls(self) -> Iterable[tuple[MlaVariant, int]]:
        """Return the calls of mlagen for the batches of the group, converted ones too."""
        for variant, rows in super().decode_calls():
            yield variant, rows
            if self.converts:
                yield replace(variant, kv_dtype=DType.BF16, page_size=PAGE_SIZE), rows


class MlagenSparseMLAImpl(DecodeImpl, SparseMLACommonImpl[MlagenSparseMLAMetadata]):
    """Every query token attends to the tokens of its top-k indices."""

    def __init__(self, *args: Any, **mla_args: Any) -> None:
        super().__init__(*args, **mla_args)
        # vLLM's rows of fp8_ds_mla have RoPE elements, of zeros without RoPE.
        self.row_elements: int | None = None
        if self.kv_cache_dtype == FP8_DS_MLA and self.qk_rope_head_dim == 0:
            self.row_elements = DType.FP8_DS_MLA.row_bytes(self.kv_lora_rank)
            # That prefill gathers whole rows into a workspace without RoPE.
            self.supports_dense_mha_prefill = False
        if envs.VLLM_BATCH_INVARIANT:  # it depends on the longest prefill of a batch
            self.supports_dense_mha_prefill = False

    def forward_mqa(
        self, q: Query, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the rows of top-k indices, of a long prefill after their conversion."""
        latent, first = latent_of(q), attn_metadata.num_decode_tokens
        conversion = attn_metadata.conversion
        if conversion is None or len(latent) <= first:
            result: tuple[torch.Tensor, torch.Tensor | None] = super().forward_mqa(
                q, kv_c_and_k_pe_cache, attn_metadata, layer
            )
            return result
        out = latent.new_empty(*latent.shape[:2], self.kv_lora_rank)
        if first:
            front = part_of(q, slice(first))
            out[:first] = super().forward_mqa(front, kv_c_and_k_pe_cache, attn_metadata, layer)[0]
        conversion.attend(
            self,
            part_of(q, slice(first, None)),
            kv_c_and_k_pe_cache,
            self.topk_indices_buffer[first : len(latent)],
            attn_metadata.block_size,
            out[first:],
        )
        return out, None

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
        # An index counts rows from the start of the cache, those of other layers between two
        # blocks of this one included.
        rows, rows_per_block = flat_kv_row_view(kv_cache, block_size)
        bmm1_scale, bmm2_scale = scales(self, layer, q, kv_cache)
        pages = pages_of(rows, rows_per_block, block_size)[..., : self.row_elements]
        keywords: dict[str, Any] = {"bmm1_scale": bmm1_scale, "bmm2_scale": bmm2_scale}
        keywords |= {"return_lse": self.need_to_return_lse_for_decode, "return_lse_base": "basee"}
        return per_token(attend(self, q, pages, topk_indices, valid_counts, **keywords))


def pages_of(rows: torch.Tensor, rows_per_block: int, block_size: int) -> torch.Tensor:
    """Return the rows of a cache as pages without a row between them."""
    return rows.view(-1, page_size_of(math.gcd(rows_per_block, block_size)), rows.shape[-1])


class MlagenSparseMLABackend(MlagenMLABackend):
    """The sparse MLA backend, as vLLM selects and validates it."""

    name = "MLAGEN_MLA_SPARSE"
    impl = MlagenSparseMLAImpl
    builder = MlagenSparseMLAMetadataBuilder

    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        *MlagenMLABackend.supported_kv_cache_dtypes,
        FP8_DS_MLA,
    ]

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return any block size, which :func:`pages_of` splits into pages.

        vLLM cannot split blocks among those of other layers, as models with an indexer have them.
        """
        del kv_cache_spec
        return [MultipleOf(min(PAGE_SIZES))]

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
        """Return the cache spec with blocks whole pages apart, as the indices count rows."""
        return align_blocks_to_rows(spec, page_size_of(spec.block_size))
