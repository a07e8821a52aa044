"""Named sets of benchmark cases, states of the GPU, and libraries to compare with."""

from __future__ import annotations

from typing import Any, TypeAlias

# fresh: the clock of an idle GPU. sustained: after half a second of the same calls, when power
# decides the clock. model: behind the projection of a decode layer, whose own time is subtracted.
MODES = ("fresh", "sustained", "model")

LIBRARIES = ("flashinfer", "flashmla", "fa3")


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

SUITES = {"quick": _QUICK, "full": _FULL}
