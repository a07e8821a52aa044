"""Multi-head latent attention: the entry points of ``flashinfer.mla``, and Modular's."""

from mlagen.mla.contract import MLAInputContract, MLAPlanMetadata
from mlagen.mla.dsv4 import (
    batch_decode_sparse_mla_dsv4,
    trtllm_batch_decode_sparse_mla_dsv4,
)
from mlagen.mla.flare import PagedKVCache, flare_mla_decoding
from mlagen.mla.masks import (
    AndMask,
    CausalMask,
    CausalPaddingMask,
    ChunkedCausalMask,
    ChunkedMask,
    MaterializedMask,
    NullMask,
    OrMask,
    SlidingWindowCausalMask,
    SlidingWindowNonCausalMask,
)
from mlagen.mla.trtllm import trtllm_batch_decode_with_kv_cache_mla
from mlagen.mla.wrapper import BatchMLAPagedAttentionWrapper
from mlagen.mla.xqa import xqa_batch_decode_with_kv_cache_mla

__all__ = [
    "AndMask",
    "BatchMLAPagedAttentionWrapper",
    "CausalMask",
    "CausalPaddingMask",
    "ChunkedCausalMask",
    "ChunkedMask",
    "MLAInputContract",
    "MLAPlanMetadata",
    "MaterializedMask",
    "NullMask",
    "OrMask",
    "PagedKVCache",
    "SlidingWindowCausalMask",
    "SlidingWindowNonCausalMask",
    "batch_decode_sparse_mla_dsv4",
    "flare_mla_decoding",
    "trtllm_batch_decode_sparse_mla_dsv4",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]
