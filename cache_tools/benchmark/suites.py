"""Named sets of benchmark cases, states of the GPU, and libraries to compare with."""

from __future__ import annotations

from typing import Any, TypeAlias

# fresh: the clock of an idle GPU. sustained: after half a second of the same calls, when power
# decides the clock. model: behind the projection of a decode layer, whose own time is subtracted.
MODES = ("fresh", "sustained", "model")

LIBRARIES = ("flashinfer", "flashmla", "fa3", "hpc", "triton")


Facts: TypeAlias = dict[str, Any]

_E4M3: Facts = {"dtype": "e4m3"}
_TOPK: Facts = {"seq_len": 8192, "top_k": 2048}
_DSA: Facts = {**_TOPK, "kv_dtype": "fp8_ds_mla"}
_NO_ROPE: Facts = {"qk_rope_head_dim": 0, "heads": 64}

# DeepSeek-V3 with tensor parallelism 1, 2 and 8; one long request, which needs split-KV; requests
# too short to fill the GPU; FP8; sparse attention of DeepSeek-V3.2. Then a large batch and one long
# request of GQA, with a BF16 and an FP8 KV cache.
_QUICK: tuple[tuple[str, Facts], ...] = (
    ("mla", {}),
    ("mla", {"heads": 64}),
    ("mla", {"heads": 16}),
    ("mla", {"batch": 1, "seq_len": 65536}),
    ("mla", {"batch": 16, "seq_len": 1024}),
    ("mla", _E4M3),
    ("mla", _DSA),
    ("gqa", {}),
    ("gqa", {"batch": 1, "seq_len": 131072}),
    ("gqa", {"kv_dtype": "e4m3"}),
    ("gqa", {"batch": 1, "seq_len": 131072, "kv_dtype": "e4m3"}),
)

_FULL: tuple[tuple[str, Facts], ...] = (
    # MLA in bf16.
    ("mla", {}),
    ("mla", {"batch": 64, "seq_len": 8192}),
    ("mla", {"batch": 32}),
    ("mla", {"batch": 80}),
    ("mla", {"heads": 64}),
    ("mla", {"heads": 16}),
    ("mla", {"batch": 64, "seq_len": 16384, "heads": 16}),
    ("mla", {"seq_len": 1024, "heads": 16}),
    ("mla", {"q_len": 2}),
    ("mla", {"heads": 16, "q_len": 2}),
    ("mla", {"batch": 1, "seq_len": 65536}),
    ("mla", {"batch": 1, "seq_len": 131072, "heads": 16}),
    ("mla", {"batch": 4, "seq_len": 16384}),
    ("mla", {"batch": 16, "seq_len": 1024}),
    ("mla", {"batch": 2, "seq_len": 1024, "heads": 16}),
    ("mla", {"is_ragged": True}),
    ("mla", {"heads": 16, "is_ragged": True}),
    # MLA in e4m3.
    ("mla", _E4M3),
    ("mla", {**_E4M3, "heads": 64}),
    ("mla", {**_E4M3, "heads": 16}),
    ("mla", {**_E4M3, "batch": 64, "seq_len": 16384, "heads": 16}),
    ("mla", {**_E4M3, "batch": 1, "seq_len": 131072}),
    ("mla", {**_E4M3, "batch": 16, "seq_len": 1024}),
    ("mla", {**_E4M3, "q_len": 2}),
    # A bf16 query over an FP8 KV cache.
    ("mla", {"kv_dtype": "e4m3"}),
    ("mla", {"kv_dtype": "e4m3", "heads": 16}),
    # Sparse MLA: the FP8 KV cache of DeepSeek-V3.2 under a bf16 and an e4m3 query, a bf16 cache.
    ("mla", _DSA),
    ("mla", {**_DSA, "heads": 64}),
    ("mla", {**_DSA, "heads": 16}),
    ("mla", {**_DSA, "batch": 16}),
    ("mla", {**_DSA, "batch": 8, "heads": 16}),
    ("mla", {**_DSA, "batch": 1}),
    ("mla", {**_DSA, "dtype": "e4m3"}),
    ("mla", {**_DSA, "dtype": "e4m3", "heads": 64}),
    ("mla", {**_TOPK, "batch": 64}),
    ("mla", {**_TOPK, "heads": 32}),
    ("mla", {**_TOPK, "heads": 8}),
    # MLA without rope, with tensor parallelism 1 and 8 of GLM-5.3-Flash: dense, then sparse.
    ("mla", _NO_ROPE),
    ("mla", {**_NO_ROPE, "heads": 8}),
    ("mla", {**_NO_ROPE, **_E4M3}),
    ("mla", {**_NO_ROPE, **_TOPK}),
    ("mla", {**_NO_ROPE, **_TOPK, "heads": 8}),
    ("mla", {**_NO_ROPE, **_TOPK, "kv_dtype": "e4m3"}),
    ("mla", {**_NO_ROPE, **_DSA}),
    ("mla", {**_NO_ROPE, **_DSA, "heads": 8}),
    # GQA in bf16.
    ("gqa", {}),
    ("gqa", {"batch": 64, "seq_len": 8192}),
    ("gqa", {"batch": 16, "seq_len": 8192}),
    ("gqa", {"batch": 1, "seq_len": 131072}),
    ("gqa", {"batch": 256, "seq_len": 1024}),
    ("gqa", {"heads": 8, "kv_heads": 1}),
    ("gqa", {"batch": 1}),
    ("gqa", {"q_len": 4}),
    ("gqa", {"seq_len": 16384, "batch": 64, "window_left": 1023}),
    # GQA with a quantized KV cache.
    ("gqa", {"kv_dtype": "e4m3"}),
    ("gqa", {"kv_dtype": "e4m3", "batch": 64, "seq_len": 8192}),
    ("gqa", {"kv_dtype": "e4m3", "batch": 16, "seq_len": 8192}),
    ("gqa", {"kv_dtype": "e4m3", "batch": 1, "seq_len": 131072}),
    ("gqa", {"kv_dtype": "e4m3", "batch": 256, "seq_len": 1024}),
    ("gqa", {"kv_dtype": "int8"}),
    ("gqa", {"kv_dtype": "nvfp4"}),
)

# DeepSeek-V4: tokens of the window alone; top-k of the compressed tokens of 4:1, with V4-Flash's
# 512 and V4-Pro's 1024; all of those of 128:1, with contexts of 64k and 1M.
_SWA: Facts = {"kv_dtype": "fp8_dsv4"}
_FLASH: Facts = {**_SWA, "top_k": 512}
_PRO: Facts = {**_SWA, "top_k": 1024, "seq_len": 8192}
_WIDE: Facts = {**_SWA, "top_k": 2048, "seq_len": 16384}
_HCA_64K: Facts = {**_SWA, "compress_ratio": 128, "top_k": 512, "seq_len": 65536}
_HCA_1M: Facts = {**_SWA, "compress_ratio": 128, "top_k": 8192, "seq_len": 1048576, "batch": 4}
# With drafts, query tokens choose disjoint tokens from twice as many.
_DRAFT: Facts = {"batch": 64, "q_len": 2, "seq_len": 8192}
_DRAFTS: Facts = {"batch": 32, "q_len": 4, "seq_len": 16384}

_V4: tuple[tuple[str, Facts], ...] = (
    ("mla", {**_SWA, "heads": 8}),
    ("mla", {**_SWA, "heads": 64}),
    ("mla", {**_FLASH, "heads": 8, "batch": 32}),
    ("mla", {**_FLASH, "heads": 8}),
    ("mla", {**_FLASH, "heads": 16}),
    ("mla", {**_FLASH, "heads": 64, "batch": 32}),
    ("mla", {**_FLASH, "heads": 64}),
    ("mla", {**_PRO, "heads": 16}),
    ("mla", {**_PRO, "heads": 128, "batch": 32}),
    ("mla", {**_PRO, "heads": 128}),
    ("mla", {**_FLASH, **_DRAFT, "heads": 64}),
    ("mla", {**_HCA_1M, "heads": 16}),
    ("mla", {**_HCA_1M, "heads": 128}),
    ("mla", {**_FLASH, "heads": 8, "batch": 1}),
    ("mla", {**_FLASH, "heads": 64, "batch": 1024}),
    # The other heads of tensor parallelism, and batches.
    ("mla", {**_SWA, "heads": 16}),
    ("mla", {**_SWA, "heads": 128}),
    ("mla", {**_FLASH, "heads": 16, "batch": 32}),
    ("mla", {**_FLASH, "heads": 32}),
    ("mla", {**_FLASH, "heads": 64, "batch": 256}),
    ("mla", {**_FLASH, "heads": 8, "batch": 1024}),
    ("mla", {**_PRO, "heads": 8}),
    ("mla", {**_PRO, "heads": 16, "batch": 32}),
    ("mla", {**_WIDE, "heads": 16}),
    ("mla", {**_WIDE, "heads": 64}),
    ("mla", {**_WIDE, "heads": 128}),
    ("mla", {**_HCA_64K, "heads": 16}),
    ("mla", {**_HCA_64K, "heads": 64}),
    # Speculative tokens.
    ("mla", {**_FLASH, **_DRAFT, "heads": 8}),
    ("mla", {**_PRO, **_DRAFT, "heads": 16, "seq_len": 16384}),
    ("mla", {**_PRO, **_DRAFT, "heads": 128, "seq_len": 16384}),
    ("mla", {**_FLASH, **_DRAFTS, "heads": 16}),
    ("mla", {**_FLASH, **_DRAFTS, "heads": 64}),
    ("mla", {**_PRO, **_DRAFTS, "heads": 128, "seq_len": 32768}),
    ("mla", {**_HCA_64K, "heads": 16, "batch": 64, "q_len": 2}),
    ("mla", {**_HCA_1M, "heads": 16, "q_len": 4}),
    # Few requests.
    *(("mla", {**_SWA, "heads": heads, "batch": 1}) for heads in (8, 128)),
    *(("mla", {**_FLASH, "heads": heads, "batch": 1}) for heads in (16, 64)),
    *(("mla", {**_PRO, "heads": heads, "batch": 1}) for heads in (16, 128)),
    *(("mla", {**_HCA_64K, "heads": heads, "batch": 1}) for heads in (8, 64)),
    *(("mla", {**_FLASH, "heads": heads, "batch": 8}) for heads in (8, 64)),
    *(("mla", {**_PRO, "heads": heads, "batch": 8}) for heads in (16, 128)),
    # Lists of different lengths, and pages as SGLang has them.
    *(("mla", {**_FLASH, "heads": heads, "is_ragged": True}) for heads in (8, 64)),
    ("mla", {**_PRO, "heads": 128, "is_ragged": True}),
    *(("mla", {**_FLASH, "heads": heads, "page_size": 256}) for heads in (16, 64)),
    ("mla", {**_PRO, "heads": 16, "page_size": 256}),
    ("mla", {**_HCA_1M, "heads": 16, "page_size": 256}),
)

# GQA over caches of few bits and of wide heads: those of Gemma 4, with and without a window, and of
# Qwen3.8.
_HALF: Facts = {"heads": 32, "kv_heads": 4}
_MIMO: Facts = {"heads": 16, "kv_heads": 1, "head_dim": 192, "head_dim_vo": 128}
# MiniMax-M3 and Qwen3.8.
_MSA: Facts = {"heads": 16, "kv_heads": 1, "seq_len": 32768, "top_k": 2048}
_MSA |= {"sparse_block": 128, "page_size": 128}
_QSA: Facts = {"heads": 12, "kv_heads": 1, "head_dim": 256, "seq_len": 16384, "top_k": 2048}
_WIDE_HEADS: tuple[Facts, ...] = (
    {**_HALF, "head_dim": 256},
    {"heads": 24, "kv_heads": 4, "head_dim": 256},
    {"heads": 16, "kv_heads": 8, "head_dim": 256, "seq_len": 8192, "window_left": 1023},
    {**_HALF, "head_dim": 512},
    {**_HALF, "head_dim": 512, "batch": 64},
    {"heads": 8, "kv_heads": 1, "head_dim": 512},
    {"heads": 8, "kv_heads": 1, "head_dim": 512, "batch": 32, "seq_len": 32768},
)

_GQA: tuple[tuple[str, Facts], ...] = (
    ("gqa", {"kv_dtype": "e4m3"}),
    ("gqa", {"kv_dtype": "int8"}),
    ("gqa", {"kv_dtype": "nvfp4"}),
    *(
        ("gqa", {"kv_dtype": dtype, **shape})
        for dtype in ("int8", "nvfp4")
        for shape in (
            {"batch": 64, "seq_len": 8192},
            {"batch": 16, "seq_len": 8192},
            {"batch": 1, "seq_len": 131072},
            {"heads": 8, "kv_heads": 1},
            {**_HALF, "batch": 64},
            {**_HALF, "batch": 64, "head_dim": 256},
        )
    ),
    *(
        ("gqa", {"kv_dtype": dtype, **shape})
        for dtype in ("int8_per_token_head", "fp8_per_token_head")
        for shape in ({}, {**_HALF, "batch": 64}, {"page_size": 16})
    ),
    ("gqa", {"kv_dtype": "nvfp4", "page_size": 16}),
    ("gqa", {"kv_dtype": "nvfp4", "head_dim": 64}),
    *(("gqa", {"kv_dtype": dtype, **shape}) for dtype in (None, "e4m3") for shape in _WIDE_HEADS),
    # The heads of MiMo-V2, with tensor parallelism 4.
    *(("gqa", {**_MIMO, "kv_dtype": dtype}) for dtype in (None, "e4m3")),
    # The heads of Gemma 2.
    ("gqa", {"batch": 64, "heads": 32, "kv_heads": 16, "soft_cap": 50}),
    ("gqa", {"batch": 64, "heads": 16, "kv_heads": 8, "head_dim": 256, "soft_cap": 50}),
    # Top-k blocks, with tensor parallelism 4, 1 and 8, and top-k tokens, with 1 and 2.
    *(
        ("gqa", {**_MSA, "kv_dtype": dtype, "heads": heads, "kv_heads": kv_heads})
        for dtype in (None, "e4m3")
        for heads, kv_heads in ((16, 1), (64, 4), (8, 1))
    ),
    *(
        ("gqa", {**_MSA, "kv_dtype": "e4m3", "batch": batch, "q_len": q_len})
        for batch, q_len in ((8, 1), (32, 1), (32, 4))
    ),
    *(
        ("gqa", {**_QSA, "kv_dtype": dtype, "heads": 12 * kv_heads, "kv_heads": kv_heads})
        for dtype in (None, "e4m3", "nvfp4")
        for kv_heads in (2, 1)
    ),
    *(("gqa", {**_QSA, "batch": batch}) for batch in (8, 32)),
)

SUITES = {"quick": _QUICK, "full": _FULL, "v4": _V4, "gqa": _GQA}
