"""Named sets of benchmark cases, states of the GPU, and libraries to compare with."""

from __future__ import annotations

from typing import Any, TypeAlias

# fresh: the clock of an idle GPU. sustained: after half a second of the same calls, when power
# decides the clock. model: behind the projection of a decode layer, whose own time is subtracted.
# layer: the same behind all other kernels of one, whose code replaces that of the call.
MODES = ("fresh", "sustained", "model", "layer")

LIBRARIES = ("flashinfer", "flashmla", "fa3", "hpc", "triton")

# Values of a case by parameter, each combination of those in tuples; defaults for the rest.
Axes: TypeAlias = dict[str, Any]

_E4M3: Axes = {"dtype": "e4m3"}
_TOPK: Axes = {"seq_len": 8192, "top_k": 2048}
_DSA: Axes = {**_TOPK, "kv_dtype": "fp8_ds_mla"}
_NO_ROPE: Axes = {"qk_rope_head_dim": 0, "heads": 64}

# DeepSeek-V3 with tensor parallelism 1, 2 and 8; one long request, which needs split-KV; requests
# too short to fill the GPU; FP8; sparse attention of DeepSeek-V3.2. Then a large batch and one long
# request of GQA, with a BF16 and an FP8 KV cache.
_QUICK: dict[str, tuple[Axes, ...]] = {
    "mla": (
        {"heads": (128, 64, 16)},
        {"batch": 1, "seq_len": 65536},
        {"batch": 16, "seq_len": 1024},
        _E4M3,
        _DSA,
    ),
    "gqa": (
        {"kv_dtype": (None, "e4m3")},
        {"kv_dtype": (None, "e4m3"), "batch": 1, "seq_len": 131072},
    ),
}

_FULL: dict[str, tuple[Axes, ...]] = {
    "mla": (
        # bf16.
        {"heads": (128, 64, 16)},
        {"batch": 64, "seq_len": 8192},
        {"batch": (32, 80)},
        {"batch": 64, "seq_len": 16384, "heads": 16},
        {"seq_len": 1024, "heads": 16},
        {"heads": (128, 16), "q_len": 2},
        {"batch": 1, "seq_len": 65536},
        {"batch": 1, "seq_len": 131072, "heads": 16},
        {"batch": 4, "seq_len": 16384},
        {"batch": 16, "seq_len": 1024},
        {"batch": 2, "seq_len": 1024, "heads": 16},
        {"heads": (128, 16), "is_ragged": True},
        # e4m3.
        {**_E4M3, "heads": (128, 64, 16)},
        {**_E4M3, "batch": 64, "seq_len": 16384, "heads": 16},
        {**_E4M3, "batch": 1, "seq_len": 131072},
        {**_E4M3, "batch": 16, "seq_len": 1024},
        {**_E4M3, "q_len": 2},
        # A bf16 query over an FP8 KV cache.
        {"kv_dtype": "e4m3", "heads": (128, 16)},
        # Sparse: the FP8 KV cache of DeepSeek-V3.2 under a bf16 and an e4m3 query, a bf16 cache.
        {**_DSA, "heads": (128, 64, 16)},
        {**_DSA, "batch": (16, 1)},
        {**_DSA, "batch": 8, "heads": 16},
        {**_DSA, **_E4M3, "heads": (128, 64)},
        {**_TOPK, "batch": 64},
        {**_TOPK, "heads": (32, 8)},
        # Without rope, with tensor parallelism 1 and 8 of GLM-5.3-Flash: dense, then sparse.
        {**_NO_ROPE, "heads": (64, 8)},
        {**_NO_ROPE, **_E4M3},
        {**_NO_ROPE, **_TOPK, "heads": (64, 8)},
        {**_NO_ROPE, **_TOPK, "kv_dtype": "e4m3"},
        {**_NO_ROPE, **_DSA, "heads": (64, 8)},
    ),
    "gqa": (
        {"kv_dtype": (None, "e4m3", "int8", "nvfp4")},
        {"kv_dtype": (None, "e4m3"), "batch": (64, 16), "seq_len": 8192},
        {"kv_dtype": (None, "e4m3"), "batch": 1, "seq_len": 131072},
        {"kv_dtype": (None, "e4m3"), "batch": 256, "seq_len": 1024},
        {"heads": 8, "kv_heads": 1},
        {"batch": 1},
        {"q_len": 4},
        {"seq_len": 16384, "batch": 64, "window_left": 1023},
    ),
}

# DeepSeek-V4: tokens of the window alone; top-k of the compressed tokens of 4:1, with V4-Flash's
# 512 and V4-Pro's 1024; all of those of 128:1, with contexts of 64k and 1M.
_SWA: Axes = {"kv_dtype": "fp8_dsv4"}
_FLASH: Axes = {**_SWA, "top_k": 512}
_PRO: Axes = {**_SWA, "top_k": 1024, "seq_len": 8192}
_WIDE: Axes = {**_SWA, "top_k": 2048, "seq_len": 16384}
_HCA_64K: Axes = {**_SWA, "compress_ratio": 128, "top_k": 512, "seq_len": 65536}
_HCA_1M: Axes = {**_SWA, "compress_ratio": 128, "top_k": 8192, "seq_len": 1048576, "batch": 4}
# With drafts, query tokens choose disjoint tokens from twice as many.
_DRAFT: Axes = {"batch": 64, "q_len": 2, "seq_len": 8192}
_DRAFTS: Axes = {"batch": 32, "q_len": 4, "seq_len": 16384}

_V4: tuple[Axes, ...] = (
    {**_SWA, "heads": (8, 16, 64, 128)},
    {**_FLASH, "batch": (32, 128), "heads": (8, 16, 64)},
    {**_FLASH, "heads": 32},
    {**_FLASH, "batch": 256, "heads": 64},
    {**_FLASH, "batch": 1024, "heads": (8, 64)},
    {**_PRO, "batch": (32, 128), "heads": (16, 128)},
    {**_PRO, "heads": 8},
    {**_WIDE, "heads": (16, 64, 128)},
    {**_HCA_64K, "heads": (16, 64)},
    {**_HCA_1M, "heads": (16, 128)},
    # Speculative tokens.
    {**_FLASH, **_DRAFT, "heads": (8, 64)},
    {**_PRO, **_DRAFT, "heads": (16, 128), "seq_len": 16384},
    {**_FLASH, **_DRAFTS, "heads": (16, 64)},
    {**_PRO, **_DRAFTS, "heads": 128, "seq_len": 32768},
    {**_HCA_64K, "heads": 16, "batch": 64, "q_len": 2},
    {**_HCA_1M, "heads": 16, "q_len": 4},
    # Few requests.
    {**_SWA, "heads": (8, 128), "batch": 1},
    {**_FLASH, "heads": (8, 16, 64), "batch": 1},
    {**_FLASH, "heads": (8, 64), "batch": 8},
    {**_PRO, "heads": (16, 128), "batch": (1, 8)},
    {**_HCA_64K, "heads": (8, 64), "batch": 1},
    # Lists of different lengths, and pages as SGLang has them.
    {**_FLASH, "heads": (8, 64), "is_ragged": True},
    {**_PRO, "heads": 128, "is_ragged": True},
    {**_FLASH, "heads": (16, 64), "page_size": 256},
    {**_PRO, "heads": 16, "page_size": 256},
    {**_HCA_1M, "heads": 16, "page_size": 256},
)

# GQA over caches of few bits and of wide heads: those of Gemma 4, with and without a window, and of
# Qwen3.8.
_LOW: Axes = {"kv_dtype": ("int8", "nvfp4")}
_TOKEN_SCALES: Axes = {"kv_dtype": ("int8_per_token_head", "fp8_per_token_head")}
_16_AND_8: Axes = {"kv_dtype": (None, "e4m3")}
_HALF: Axes = {"heads": 32, "kv_heads": 4}
_GEMMA: Axes = {"heads": 16, "kv_heads": 8, "head_dim": 256}
_MIMO: Axes = {"heads": 16, "kv_heads": 1, "head_dim": 192, "head_dim_vo": 128}
_SINGLE: Axes = {"heads": 8, "kv_heads": 1, "head_dim": 512}
# MiniMax-M3 and Qwen3.8.
_MSA: Axes = {"heads": 16, "kv_heads": 1, "seq_len": 32768, "top_k": 2048}
_MSA |= {"sparse_block": 128, "page_size": 128}
_QSA: Axes = {"heads": 12, "kv_heads": 1, "head_dim": 256, "seq_len": 16384, "top_k": 2048}
_QSA_DTYPES: Axes = {"kv_dtype": (None, "e4m3", "nvfp4")}

_GQA: tuple[Axes, ...] = (
    {"kv_dtype": ("e4m3", "int8", "nvfp4")},
    {**_LOW, "batch": (64, 16), "seq_len": 8192},
    {**_LOW, "batch": 1, "seq_len": 131072},
    {**_LOW, "heads": 8, "kv_heads": 1},
    {**_LOW, **_HALF, "batch": 64, "head_dim": (128, 256)},
    {**_TOKEN_SCALES, "page_size": (64, 16)},
    {**_TOKEN_SCALES, **_HALF, "batch": 64},
    {"kv_dtype": "nvfp4", "page_size": 16},
    {"kv_dtype": "nvfp4", "head_dim": 64},
    {**_16_AND_8, **_HALF, "head_dim": (256, 512)},
    {**_16_AND_8, **_HALF, "head_dim": 512, "batch": 64},
    {**_16_AND_8, "heads": 24, "kv_heads": 4, "head_dim": 256},
    {**_16_AND_8, **_GEMMA, "seq_len": 8192, "window_left": 1023},
    {**_16_AND_8, **_SINGLE},
    {**_16_AND_8, **_SINGLE, "batch": 32, "seq_len": 32768},
    # The heads of MiMo-V2, with tensor parallelism 4.
    {**_16_AND_8, **_MIMO},
    # The heads of Gemma 2.
    {"batch": 64, "heads": 32, "kv_heads": 16, "soft_cap": 50},
    {**_GEMMA, "batch": 64, "soft_cap": 50},
    # Top-k blocks, with tensor parallelism 4, 8 and 1, and top-k tokens, with 2 and 1.
    {**_MSA, **_16_AND_8, "heads": (16, 8)},
    {**_MSA, **_16_AND_8, "heads": 64, "kv_heads": 4},
    {**_MSA, "kv_dtype": "e4m3", "batch": (8, 32)},
    {**_MSA, "kv_dtype": "e4m3", "batch": 32, "q_len": 4},
    {**_QSA, **_QSA_DTYPES},
    {**_QSA, **_QSA_DTYPES, "heads": 24, "kv_heads": 2},
    {**_QSA, "batch": (8, 32)},
)

SUITES = {"quick": _QUICK, "full": _FULL, "v4": {"mla": _V4}, "gqa": {"gqa": _GQA}}
