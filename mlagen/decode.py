"""Paged grouped-query decode: the entry points of ``flashinfer.decode``.

The MLA entry points are those of :mod:`mlagen.mla`; FlashInfer has them in both modules.
"""

from mlagen.gqa.trtllm import trtllm_batch_decode_with_kv_cache
from mlagen.gqa.wrapper import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from mlagen.gqa.xqa import xqa_batch_decode_with_kv_cache
from mlagen.mla.trtllm import trtllm_batch_decode_with_kv_cache_mla
from mlagen.mla.xqa import xqa_batch_decode_with_kv_cache_mla

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
]
