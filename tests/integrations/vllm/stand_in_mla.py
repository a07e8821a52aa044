"""Classes in place of vLLM's common MLA implementation, dense and sparse."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic

import torch

from tests.integrations.servers import stub
from tests.integrations.vllm.stand_in_base import (
    AttentionBackend,
    AttentionMetadataBuilder,
    Metadata,
)


class QueryLenSupport(Enum):
    """Which query lengths a decode batch may have."""

    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class MLACommonBackend(AttentionBackend):
    """The base class of MLA backends."""

    @classmethod
    def is_mla(cls) -> bool:
        """Return that it serves MLA."""
        return True


@dataclass
class MLACommonDecodeMetadata:
    """The decode part of a batch."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    dcp_tot_seq_lens: torch.Tensor | None


@dataclass
class MLACommonMetadata(Generic[Metadata]):
    """A batch."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    decode: Any = None


class MLACommonMetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """The builder of dense MLA batches."""

    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.SINGLE_ONLY

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        metadata_cls: Any = None,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        del layer_names, device, metadata_cls
        self.vllm_config, self.kv_cache_spec = vllm_config, kv_cache_spec
        self.dcp_world_size = vllm_config.parallel_config.decode_context_parallel_size
        self.cp_kv_cache_interleave_size = vllm_config.parallel_config.cp_kv_cache_interleave_size
        self._init_reorder_batch_threshold(1, True, supports_dcp_with_varlen)

    _build_decode = stub(
        *("self", "block_table_tensor", "seq_lens_device", "max_seq_len", "query_start_loc_cpu"),
        *("query_start_loc_device", "num_decode_tokens", "max_query_len"),
        "dcp_tot_seq_lens_device",
    )


class SparseMLACommonMetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """The builder of sparse MLA batches."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        del layer_names, device
        self.vllm_config, self.kv_cache_spec = vllm_config, kv_cache_spec
        self.dcp_world_size = vllm_config.parallel_config.decode_context_parallel_size
        self.chunked_prefill_workspace = torch.empty(128, 576, dtype=torch.bfloat16)

    build = stub("self", "common_prefix_len", "common_attn_metadata", "fast_build")


class _MlaImpl(Generic[Metadata]):
    """What both MLA implementations set."""

    can_return_lse_for_decode: bool = False
    lse_base_on_e: bool = True
    supports_dcp: bool = False
    need_to_return_lse_for_decode: bool = False
    supports_dense_mha_prefill: bool = True
    supports_quant_query_input: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        del head_size, alibi_slopes, sliding_window
        del logits_soft_cap, attn_type, kv_sharing_target_layer_name
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.scale, self.kv_cache_dtype = scale, kv_cache_dtype
        self.kv_lora_rank = mla_args["kv_lora_rank"]
        self.qk_nope_head_dim = mla_args["qk_nope_head_dim"]
        self.qk_rope_head_dim = mla_args["qk_rope_head_dim"]
        self.dcp_world_size, self.dcp_rank = 1, 0
        self.supports_quant_query_input = True


class MLACommonImpl(_MlaImpl[Metadata]):
    """The implementation of dense MLA."""

    forward_mqa = stub("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")


class SparseMLACommonImpl(_MlaImpl[Metadata]):
    """The implementation of sparse MLA, with a conversion of indices before it."""

    topk_indices_buffer: torch.Tensor | None = None

    forward_mqa = stub("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")
    _forward_mqa_kernel = stub(
        *("self", "q", "kv_cache", "topk_indices", "valid_counts", "layer", "block_size"),
        "is_decode",
    )


@dataclass(kw_only=True)
class SparseMLACommonMetadata(MLACommonMetadata[Any]):
    """A sparse batch."""

    block_table: torch.Tensor
    req_id_per_token: torch.Tensor
    seq_lens: torch.Tensor | None = None
    block_size: int = 64
    prefill: Any = None


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    workspace_starts: torch.Tensor,
    batch_size: int,
    **_: Any,
) -> None:
    """Fail, as it does without a GPU."""
    raise NotImplementedError


def triton_convert_req_index_to_global_index(
    req_id: torch.Tensor, block_table: torch.Tensor, token_indices: torch.Tensor, **_: Any
) -> Any:
    """Fail, as it does without a GPU."""
    raise NotImplementedError


def align_blocks_to_rows(spec: Any, rows: int = 1) -> Any:
    """Return the spec, as vLLM's, with an alignment; here a pair."""
    return spec, rows


def flat_kv_row_view(kv_cache: torch.Tensor, block_size: int) -> tuple[torch.Tensor, int]:
    """Return the rows of a cache, and how many lie between the starts of two blocks."""
    blocks, _, width = kv_cache.shape
    rows_per_block = kv_cache.stride(0) // width
    shape = ((blocks - 1) * rows_per_block + block_size, width)
    return kv_cache.as_strided(shape, (width, 1)), rows_per_block
