"""Invalid caches of MLA decode, message by message; rejected calls write nothing."""

from __future__ import annotations

import math

import torch

from tests.families.rejections import (
    E4M3_QUERY,
    FP8_DS_MLA,
    FP8_PER_TOKEN,
    OTHER_CACHE,
    SCALED,
    SEPARATE_ROPE,
    UNIFORM,
    Rejection,
    check,
    check_inputs,
    padded,
    rejections,
    strided,
)


@rejections(
    Rejection(
        "no tensor",
        lambda p: {"kv_cache": (p.kv_cache, p.kv_cache)},
        "kv_cache: expected a torch.Tensor, got tuple",
    ),
    Rejection(
        "another device",
        lambda p: {"kv_cache": p.kv_cache.to("meta")},
        "kv_cache.device: expected cpu (of query), got meta",
    ),
    Rejection(
        "two dimensions",
        lambda p: {"kv_cache": p.kv_cache[0]},
        "kv_cache.ndim: expected 3 or 4, got 2",
    ),
    Rejection(
        "four dimensions without one of size 1",
        lambda p: {"kv_cache": p.kv_cache[:, None].expand(-1, 2, -1, -1)},
        "kv_cache.shape: expected [pages, 1, page_size, head_dim] or "
        "[pages, page_size, 1, head_dim], got [7, 2, 64, 576]",
    ),
    Rejection(
        "another dtype than the query",
        lambda p: {"kv_cache": p.kv_cache.half()},
        "kv_cache.dtype: expected torch.bfloat16 or torch.float8_e4m3fn or torch.uint8 "
        "(query torch.bfloat16; uint8 for 656-byte rows), got torch.float16",
    ),
    Rejection(
        "another width",
        lambda p: {"kv_cache": p.kv_cache[..., :320]},
        "kv_cache.shape[-1]: expected 576 (kv_lora_rank + qk_rope_head_dim), got 320",
    ),
    Rejection(
        "gaps in a token",
        lambda p: {"kv_cache": strided(p.kv_cache)},
        "kv_cache.stride(-1): expected 1, got 2",
    ),
    Rejection(
        "a token stride that is no multiple of 16 bytes",
        lambda p: {"kv_cache": padded(p.kv_cache, 1)},
        "kv_cache.stride(1): expected a multiple of 8, got 577",
    ),
)
def test_kv_cache(rejection: Rejection) -> None:
    """Layout, dtype, device and strides of the cache are checked."""
    check(rejection)


@rejections(
    Rejection(
        "bf16 under a query of e4m3",
        lambda p: {"kv_cache": p.kv_cache.bfloat16()},
        "kv_cache.dtype: expected torch.float8_e4m3fn (dtype of query), got torch.bfloat16",
        E4M3_QUERY,
    ),
    Rejection(
        "fp8_ds_mla with an e4m3 query",
        lambda p: {"kv_cache": torch.zeros(*p.kv_cache.shape[:2], 656, dtype=torch.uint8)},
        "kv_cache.dtype: expected torch.float8_e4m3fn (dtype of query), got torch.uint8",
        E4M3_QUERY,
    ),
    Rejection(
        "fp8_ds_mla rows of another width",
        lambda p: {"kv_cache": p.kv_cache[..., :640]},
        "kv_cache.shape[-1]: expected 656 (bytes of a row of fp8_ds_mla), got 640",
        FP8_DS_MLA,
    ),
    Rejection(
        "fp8_ds_mla with a stride that is no multiple of 16 bytes",
        lambda p: {"kv_cache": padded(p.kv_cache, 4)},
        "kv_cache.stride(1): expected a multiple of 16, got 660",
        FP8_DS_MLA,
    ),
    Rejection(
        "pages without tokens",
        lambda p: {"kv_cache": p.kv_cache[:, :0]},
        "kv_cache.shape: expected pages of 1 token or more, got 0",
    ),
)
def test_stored_formats(rejection: Rejection) -> None:
    """Each query dtype has its cache dtypes and row widths."""
    check(rejection)


@rejections(
    Rejection(
        "no tensor",
        lambda _: {"rope_cache": []},
        "kv_cache: expected a torch.Tensor, got list",
        SEPARATE_ROPE,
    ),
    Rejection(
        "another dtype",
        lambda p: {"rope_cache": p.extra_args["rope_cache"].half()},
        "kv_cache.dtype: expected torch.bfloat16 (dtype of kv_cache), got torch.float16",
        SEPARATE_ROPE,
    ),
    Rejection(
        "other pages",
        lambda p: {"rope_cache": p.extra_args["rope_cache"][:3]},
        "kv_cache.shape: expected [7, 64, 64] (pages, page_size, qk_rope_head_dim), "
        "got [3, 64, 64]",
        SEPARATE_ROPE,
    ),
    Rejection(
        "a latent part as wide as the whole",
        lambda p: {"kv_cache": p.kv_cache.repeat(1, 1, 2)[..., :576]},
        "kv_cache.shape[-1]: expected 512 (kv_lora_rank), got 576",
        SEPARATE_ROPE,
    ),
    Rejection(
        "fp8_ds_mla with a separate rope part",
        lambda p: {"rope_cache": p.kv_cache},
        "kv_cache: expected None for fp8_ds_mla, got a tensor",
        FP8_DS_MLA,
    ),
)
def test_a_separate_rope_cache(rejection: Rejection) -> None:
    """A separate rope part has the pages of the latent part."""
    check_inputs(rejection)


@rejections(
    Rejection(
        "another dtype",
        lambda p: {"value_cache": p.kv_cache.half()},
        "v_cache.dtype: expected torch.bfloat16 (dtype of kv_cache), got torch.float16",
        OTHER_CACHE,
    ),
    Rejection(
        "other pages",
        lambda p: {"value_cache": p.kv_cache[1:]},
        "v_cache.shape: expected [7, 64, 576] (shape of kv_cache), got [6, 64, 576]",
        OTHER_CACHE,
    ),
    Rejection(
        "other strides",
        lambda p: {"value_cache": padded(p.kv_cache, 8)},
        "v_cache.stride(): expected (36864, 576, 1) (of kv_cache), got (37376, 584, 1)",
        OTHER_CACHE,
    ),
)
def test_a_separate_value_cache(rejection: Rejection) -> None:
    """Separate values have the strides of the keys."""
    check_inputs(rejection)


@rejections(
    Rejection(
        "no tensor",
        lambda _: {"kv_scales": 1.0},
        "kv_scales: expected a torch.Tensor, got float",
        SCALED,
    ),
    Rejection(
        "one scale for a token",
        lambda p: {"kv_scales": p.extra_args["kv_scales"][..., 0]},
        "kv_scales.shape: expected [7, 64, 4] (pages, page_size, scales of a token), got [7, 64]",
        SCALED,
    ),
    Rejection(
        "float64",
        lambda p: {"kv_scales": p.extra_args["kv_scales"].double()},
        "kv_scales.dtype: expected torch.float32, got torch.float64",
        SCALED,
    ),
    Rejection(
        "gaps",
        lambda p: {"kv_scales": strided(p.extra_args["kv_scales"])},
        "kv_scales.stride(-1): expected 1, got 2",
        SCALED,
    ),
    Rejection(
        "another device",
        lambda p: {"kv_scales": p.extra_args["kv_scales"].to("meta")},
        "kv_scales.device: expected cpu (of query), got meta",
        SCALED,
    ),
    Rejection(
        "four scales for an fp8_per_token row",
        lambda p: {"kv_scales": p.extra_args["kv_scales"][..., None].expand(-1, -1, 4)},
        "kv_scales.shape: expected [7, 64] (pages, page_size), got [7, 64, 4]",
        FP8_PER_TOKEN,
    ),
    Rejection(
        "a cache that has none",
        lambda _: {"kv_scales": torch.ones(7, 64, 4)},
        "kv_scales: expected None for query bf16, cache bf16, got a tensor",
        UNIFORM,
    ),
    Rejection(
        "one number for a cache that has none",
        lambda _: {"latent_scale": 2.0},
        "latent_scale: expected 1.0 unless the cache is e4m3 and the query is not, got 2.0",
        UNIFORM,
    ),
    Rejection(
        "text for a number",
        lambda _: {"rope_scale": "1"},
        "rope_scale: expected a float, got '1'",
        SCALED,
    ),
    Rejection(
        "a number beyond float32",
        lambda _: {"rope_scale": 1e39},
        "rope_scale: expected a number that float32 can hold, got 1e+39",
        SCALED,
    ),
    Rejection(
        "NaN where there is no scale",
        lambda _: {"rope_scale": math.nan},
        "rope_scale: expected 1.0 unless the cache is e4m3 and the query is not, got nan",
        UNIFORM,
    ),
)
def test_scales_of_the_cache(rejection: Rejection) -> None:
    """Scales require an e4m3 cache with a 16-bit query, or fp8_per_token."""
    check_inputs(rejection)
