"""Modules in place of vLLM, with the names that the plugin and its tests take from it.

``test_signatures.py`` compares them with vLLM where it is installed.
"""

from __future__ import annotations

from typing import Any

from tests.integrations.servers import named
from tests.integrations.vllm import stand_in_base as base
from tests.integrations.vllm import stand_in_flashinfer as flashinfer
from tests.integrations.vllm import stand_in_mla as mla

# The modules of vLLM with the names that the plugin and its tests import.
MODULES: dict[str, dict[str, Any]] = {
    "vllm._custom_ops": named(mla.cp_gather_and_upconvert_fp8_kv_cache),
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
    "vllm.model_executor.layers.attention.mla_attention": named(
        *(mla.MLACommonBackend, mla.MLACommonDecodeMetadata, mla.MLACommonImpl),
        *(mla.MLACommonMetadata, mla.MLACommonMetadataBuilder, mla.QueryLenSupport),
    ),
    "vllm.model_executor.layers.attention.sparse_mla_attention": named(
        *(mla.SparseMLACommonImpl, mla.SparseMLACommonMetadata),
        mla.SparseMLACommonMetadataBuilder,
    ),
    "vllm.logger": named(base.init_logger),
    "vllm.model_executor.warmup.jit_warmup": named(base.VllmJitKernel),
    "vllm.model_executor.models.config": named(
        base.VerifyAndUpdateConfig,
        MODELS_CONFIG_MAP=dict.fromkeys(
            ("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM"),
            base.VerifyAndUpdateConfig,
        ),
    ),
    "vllm.platforms.interface": named(base.DeviceCapability),
    "vllm.utils.flashinfer": named(
        *(flashinfer.can_use_trtllm_attention, flashinfer.force_use_trtllm_attention),
        flashinfer.supports_trtllm_attention,
    ),
    "vllm.utils.torch_utils": named(flashinfer.canonicalize_singleton_dim_strides),
    "vllm.v1.attention.backend": named(
        *(base.AttentionBackend, base.AttentionCGSupport, base.AttentionMetadataBuilder),
        *(base.AttentionType, base.CommonAttentionMetadata, base.MultipleOf),
        base.max_decode_query_len,
    ),
    "vllm.v1.attention.backends.flashinfer": named(
        *(flashinfer.FlashInferBackend, flashinfer.FlashInferDecodeKernel),
        *(flashinfer.FlashInferImpl, flashinfer.FlashInferMetadata),
        *(flashinfer.FlashInferMetadataBuilder, flashinfer.FlashInferTrtllmAPIDecode),
    ),
    "vllm.v1.attention.backends.mla.sparse_utils": named(
        *(mla.align_blocks_to_rows, mla.flat_kv_row_view),
        mla.triton_convert_req_index_to_global_index,
    ),
    "vllm.v1.attention.backends.registry": named(base.AttentionBackendEnum),
    "vllm.v1.attention.backends.utils": named(flashinfer.get_flashinfer_layout_string),
    "vllm.v1.kv_cache_interface": named(flashinfer.KVCacheLayout, flashinfer.is_quantized_kv_cache),
}
