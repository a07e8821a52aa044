"""Cases of a benchmark: selection, and FLOP, bytes and roofline bounds against numbers by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cache_tools.benchmark.outcomes import Ceilings
from cache_tools.benchmark.selection import case_of, select_cases
from mlagen.errors import MlagenError


def test_without_options_the_suites_are_measured() -> None:
    """The full suite holds the quick one, of both families, and no case twice."""
    quick, full = select_cases(), [case.label for case in select_cases(suite="full")]
    for family in ("mla", "gqa"):
        assert select_cases([family]) == [each for each in quick if each.family == family]
        assert case_of(family) in quick
    assert len(set(full)) == len(full)
    assert set(full) > {case.label for case in quick}


def test_options_select_a_family_and_its_defaults() -> None:
    """The product of all values, once each; MLA is assumed, and the cache has the query's dtype."""
    mla, gqa = select_cases(["mla", "gqa"], {"heads": [32], "kv_heads": [4], "head_dim": [64]})
    product = select_cases(["mla"], {"batch": [1, 2, 1], "kv_dtype": ["bf16", "e4m3"]})

    pairs = [(case.batch, case.kv_dtype.value) for case in product]
    assert pairs == [(1, "bf16"), (1, "e4m3"), (2, "bf16"), (2, "e4m3")]
    assert mla == case_of("mla", heads=32)
    assert (gqa.heads, gqa.kv_heads, gqa.head_dim_qk, gqa.head_dim_vo) == (32, 4, 64, 64)
    assert select_cases(None, {"batch": [7]}) == [case_of("mla", batch=7)]
    assert select_cases(is_ragged=True) == [case_of("mla", is_ragged=True)]
    dtypes = ["fp16", "e4m3"]
    assert [case.kv_dtype.value for case in select_cases(None, {"dtype": dtypes})] == dtypes


def test_a_filter_chooses_cases_by_name() -> None:
    """It matches a part of the label, of a suite and of given values."""
    found = select_cases(["mla"], suite="full", pattern=r"e4m3, .*\+0|64 heads, top-k")
    assert [case.label for case in found] == [
        "mla bf16/fp8_ds_mla, 128 x 8192, 64 heads, top-k 2048",
        "mla e4m3/fp8_ds_mla, 128 x 8192, 64 heads, top-k 2048",
        "mla e4m3, 128 x 4096, 64 heads, dims 512+0",
        "mla bf16/e4m3, 128 x 8192, 64 heads, dims 512+0, top-k 2048",
    ]
    axes = {"batch": [1, 2]}
    assert select_cases(None, axes, pattern="^mla bf16, 2 x") == [case_of("mla", batch=2)]


SMALL = {"batch": 1, "seq_len": 10, "heads": 2}
GQA_SMALL = {**SMALL, "kv_heads": 1, "head_dim": 16}
# Keys and values of 2 KV heads, 16 one-byte elements each.
FP8_GQA = {**GQA_SMALL, "batch": 2, "heads": 4, "kv_heads": 2, "kv_dtype": "e4m3"}
# Two query tokens of each of 3 requests read 5 rows of 656 bytes of their own.
SPARSE = {**SMALL, "batch": 3, "q_len": 2, "top_k": 5, "kv_dtype": "fp8_ds_mla"}
# The three query tokens of a request attend to 8, 9 and 10 tokens.
DRAFTS = {"batch": 2, "seq_len": 10, "heads": 4, "q_len": 3}
ONE = {"batch": 1, "seq_len": 1, "heads": 1, "dtype": "e4m3"}
# Rows attend to 4 tokens each; together they read the last 6.
WINDOW = {**GQA_SMALL, "q_len": 3, "window_left": 3}

BLOCKS = {**GQA_SMALL, "seq_len": 384, "page_size": 128, "top_k": 256, "sparse_block": 128}

# DeepSeek-V4: two requests of two query tokens attend to 128 tokens of their window, 129 together,
# and to 4 compressed ones each, of their own at 4:1 and the same at 128:1.
V4 = {"batch": 2, "q_len": 2, "seq_len": 512, "heads": 4, "kv_dtype": "fp8_dsv4", "top_k": 4}
V4_QUERIES = 16 * 2048 + 4 * 132 * 4  # rows in and out, and entries of the lists


@pytest.mark.parametrize(
    ("family", "facts", "flop", "moved_bytes"),
    [
        # 524288 tokens of 1152 bytes; 16384 rows of 1152 bytes in, 1024 out; 2 * 1088 FLOP a pair.
        ("mla", {}, 16_384 * 4096 * 2176, 603_979_776 + 18_874_368 + 16_777_216),
        ("mla", DRAFTS, 2 * 4 * 27 * 2176, 20 * 1152 + 24 * 1152 + 24 * 1024),
        # One byte per element, except the bf16 output.
        ("mla", ONE, 2176, 576 * 2 + 1024),
        ("gqa", FP8_GQA, 2 * 4 * 10 * 64, 20 * 2 * 32 + 8 * 32 + 8 * 32),
        ("gqa", {"dtype": "fp16"}, 8192 * 4096 * 512, 524_288 * 4096 + 2 * 8192 * 256),
        ("mla", {**ONE, "kv_dtype": "fp8_ds_mla", "qk_rope_head_dim": 0}, 2048, 528 + 512 + 1024),
        ("mla", SPARSE, 2 * 2 * 30 * 1088, 30 * 656 + 12 * 1152 + 12 * 1024),
        ("gqa", WINDOW, 2 * 2 * 12 * 32, 6 * 64 + 6 * 32 + 6 * 32),
        ("mla", V4, 2048 * 16 * 132, (2 * 129 + 16) * 584 + V4_QUERIES),
        ("mla", {**V4, "compress_ratio": 128}, 2048 * 16 * 132, (258 + 8) * 584 + V4_QUERIES),
        (
            *("mla", {**V4, "kv_dtype": "fp8_dsv41_fp4_ca"}, 2048 * 16 * 132),
            258 * 528 + 16 * 288 + V4_QUERIES,
        ),
        ("mla", {**V4, "top_k": 0}, 2048 * 16 * 128, 258 * 584 + 16 * 2048 + 4 * 128 * 4),
        # Two elements a byte, and a scale of one byte for 16.
        ("gqa", {**GQA_SMALL, "kv_dtype": "nvfp4"}, 2 * 2 * 10 * 32, 10 * 18 + 2 * 32 + 2 * 32),
        # Two blocks of each of two KV heads; the last has a token after the first query token.
        (
            *("gqa", {**BLOCKS, "heads": 4, "kv_heads": 2, "q_len": 2}, 2 * 4 * 511 * 32),
            511 * 2 * 64 + 2 * 8 * 32 + 8 * 4,
        ),
        # KV heads share their indices.
        (
            *("gqa", {**FP8_GQA, "top_k": 5}, 2 * 4 * 10 * 32),
            10 * 2 * 32 + 8 * 32 + 8 * 32 + 10 * 4,
        ),
        # A byte an element, and two scales of four bytes.
        (
            *("gqa", {**GQA_SMALL, "kv_dtype": "int8_per_token_head"}, 2 * 2 * 10 * 32),
            10 * 40 + 2 * 32 + 2 * 32,
        ),
    ],
)
def test_work_matches_hand_computed_numbers(
    family: str, facts: dict[str, Any], flop: int, moved_bytes: int
) -> None:
    """An FMA counts two operations, tokens are read once, and masked scores do not count."""
    case = case_of(family, **facts)
    assert (case.flop, case.moved_bytes) == (flop, moved_bytes)
    assert case.flop_per_byte == flop / moved_bytes


def test_the_suite_of_deepseek_v4_has_the_hand_computed_bounds() -> None:
    """A case differs from every other; bytes and FLOP give the bounds of an H200."""
    cases = select_cases(suite="v4")
    labels = {case.label.removeprefix("mla bf16/fp8_dsv4, "): case for case in cases}
    assert len(labels) == len(cases) > 50
    h200 = Ceilings(read_gb_s=4328.0, bf16_tflop_s=682.0)
    for label, us in {
        "128 x 4096, 8 heads, 128 tokens": 2.7,
        "128 x 4096, 64 heads, 128 tokens": 6.1,
        "32 x 4096, 8 heads, 128 + 512 of 4:1": 2.9,
        "128 x 4096, 8 heads, 128 + 512 of 4:1": 11.6,
        "128 x 4096, 16 heads, 128 + 512 of 4:1": 12.1,
        "1024 x 4096, 64 heads, 128 + 512 of 4:1": 126.0,
        "128 x 8192, 128 heads, 128 + 1024 of 4:1": 56.7,
        "64 x 8192, 64 heads, 128 + 512 of 4:1, q_len 2": 15.7,
        "4 x 1048576, 128 heads, 128 + 8192 of 128:1": 12.8,
    }.items():
        assert round(h200.bound_us(labels[label]), 1) == us
    ragged = case_of("mla", kv_dtype="fp8_dsv4", top_k=512, batch=1000, is_ragged=True)
    swa, extra = zip(*ragged.list_lens, strict=True)
    assert (min(swa), max(swa), min(extra), max(extra)) == (1, 128, 0, 512)
    assert ragged.flop == 2048 * 128 * (sum(swa) + sum(extra))


def test_the_suite_of_gqa_has_the_hand_computed_bounds() -> None:
    """Bytes of the cache give the bounds of an H200; query and output add little to them."""
    cases = select_cases(suite="gqa")
    labels = {case.label.removeprefix("gqa bf16").lstrip("/, "): case for case in cases}
    assert len(labels) == len(cases)
    h200 = Ceilings(read_gb_s=4328.0, bf16_tflop_s=682.0)
    for label, us in {
        "int8, 128 x 4096, 64/8 heads": 248.1,
        "nvfp4, 64 x 8192, 64/8 heads": 139.5,
        "nvfp4, 1 x 131072, 64/8 heads": 34.8,
        "nvfp4, 128 x 4096, 64/8 heads, head_dim 64": 69.8,
        "int8_per_token_head, 128 x 4096, 64/8 heads": 255.8,
        "64 x 4096, 32/4 heads, head_dim 512": 496.2,
        "e4m3, 128 x 4096, 24/4 heads, head_dim 256": 248.1,
        "e4m3, 128 x 8192, 16/8 heads, head_dim 256, window_left 1023": 124.0,
        "e4m3, 32 x 32768, 8/1 heads, head_dim 512": 248.1,
        "128 x 4096, 16/1 heads, head_dim 192/128": 77.5,
        "e4m3, 128 x 32768, 64/4 heads, top-k 2048 in blocks of 128": 62.0,
        "128 x 32768, 8/1 heads, top-k 2048 in blocks of 128": 31.0,
        "e4m3, 32 x 32768, 16/1 heads, top-k 2048 in blocks of 128, q_len 4": 15.5,
        "nvfp4, 128 x 16384, 24/2 heads, head_dim 256, top-k 2048": 34.9,
        "32 x 16384, 12/1 heads, head_dim 256, top-k 2048": 15.5,
    }.items():
        assert 1 <= h200.bound_us(labels[label]) / us <= 1.06, label


def test_ragged_lengths_are_the_same_in_every_run() -> None:
    """A fixed seed spreads them from the query tokens, or one, to twice the mean."""
    case = case_of("mla", batch=1000, seq_len=100, is_ragged=True)
    assert case_of("mla", batch=3, seq_len=70, is_ragged=True).seq_lens == (105, 94, 63)
    assert (min(case.seq_lens), max(case.seq_lens)) == (1, 200)
    assert 95 < case.tokens / 1000 < 105
    assert case.tokens == sum(case.seq_lens)
    assert min(case_of("mla", batch=200, seq_len=8, q_len=6, is_ragged=True).seq_lens) == 6


@pytest.mark.parametrize(
    ("facts", "sets"),
    [
        ({}, 1),  # 640 MB in one
        ({"batch": 16, "seq_len": 1024}, 18),  # 23.3 MB each
        ({"batch": 1, "seq_len": 1, "heads": 1}, 1024),
    ],
)
def test_inputs_together_are_eight_times_the_l2_cache(facts: dict[str, Any], sets: int) -> None:
    """Inputs are evicted from L2 before their reuse, up to 1024 sets."""
    assert case_of("mla", **facts).input_sets(50 << 20) == sets


_V4 = {"kv_dtype": "fp8_dsv4"}
FP8_GQA_64 = {"kv_dtype": "e4m3", "head_dim": 64, "page_size": 16}


@pytest.mark.parametrize(
    ("family", "facts", "label", "bound"),
    [
        ("mla", {}, "bf16, 128 x 4096, 128 heads", 6e-3),
        ("mla", {"is_ragged": True, "q_len": 2}, "bf16, 128 x ~4096, 128 heads, q_len 2", 6e-3),
        ("gqa", FP8_GQA_64, "bf16/e4m3, 128 x 4096, 64/8 heads, head_dim 64, page_size 16", 5e-2),
        ("mla", _V4, "bf16/fp8_dsv4, 128 x 4096, 128 heads, 128 tokens", 1e-2),
        (
            *("mla", {**_V4, "top_k": 512, "is_ragged": True, "page_size": 256}),
            "bf16/fp8_dsv4, 128 x ~4096, 128 heads, 128 + 512 of 4:1, page_size 256",
            1e-2,
        ),
        (
            *("mla", {**_V4, "top_k": 32, "compress_ratio": 128, "q_len": 2}),
            "bf16/fp8_dsv4, 128 x 4096, 128 heads, 128 + 32 of 128:1, q_len 2",
            1e-2,
        ),
        ("mla", {"top_k": 2048}, "bf16, 128 x 4096, 128 heads, top-k 2048", 6e-3),
        ("mla", {"qk_rope_head_dim": 0}, "bf16, 128 x 4096, 128 heads, dims 512+0", 6e-3),
        ("mla", {"dtype": "e4m3"}, "e4m3, 128 x 4096, 128 heads", 5e-2),
        ("gqa", {"dtype": "fp16"}, "fp16, 128 x 4096, 64/8 heads", 6e-3),
        (
            *("gqa", {"head_dim": 192, "head_dim_vo": 128}),
            *("bf16, 128 x 4096, 64/8 heads, head_dim 192/128", 6e-3),
        ),
        ("gqa", {"soft_cap": 50}, "bf16, 128 x 4096, 64/8 heads, soft_cap 50", 6e-3),
        ("gqa", {"window_left": 0}, "bf16, 128 x 4096, 64/8 heads, window_left 0", 6e-3),
        ("gqa", {"top_k": 64}, "bf16, 128 x 4096, 64/8 heads, top-k 64", 6e-3),
        (
            *("gqa", {"top_k": 256, "sparse_block": 128, "page_size": 128}),
            *("bf16, 128 x 4096, 64/8 heads, top-k 256 in blocks of 128", 6e-3),
        ),
    ],
)
def test_a_label_has_the_non_default_values_and_fp8_a_wider_bound(
    family: str, facts: dict[str, Any], label: str, bound: float
) -> None:
    """Two cases that differ have different labels."""
    case = case_of(family, **facts)
    assert (case.label, case.error_bound) == (f"{family} {label}", bound)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"sparse_block": 64}, "sparse_block: expected 1 or 128, got 64"),
        ({"page_size": 64}, "page_size: expected 128 with top_k, got 64"),
        ({"soft_cap": 5}, "soft_cap: expected 0 with top_k, got 5"),
        ({"window_left": 5}, "window_left: expected -1 with top_k, got 5"),
        ({"head_dim_vo": 64}, "head_dim_vo: expected 128 with top_k, got 64"),
        ({"top_k": 0}, "top_k: expected a multiple of 128 (sparse_block) from 128 to 384, got 0"),
        (
            {"top_k": 130},
            "top_k: expected a multiple of 128 (sparse_block) from 128 to 384, got 130",
        ),
        (
            {"top_k": 384, "q_len": 129},
            "top_k: expected a multiple of 128 (sparse_block) from 128 to 256, got 384",
        ),
        ({"kv_dtype": "nvfp4"}, "no decode kernel over blocks of 128 tokens in nvfp4"),
        (
            {"kv_dtype": "int8_per_token_head"},
            "no sparse GQA decode kernel for decode context parallel or scales of tokens",
        ),
    ],
)
def test_a_sparse_case_that_no_model_has_is_rejected(facts: dict[str, Any], message: str) -> None:
    """The message names the option, its rule and the value."""
    with pytest.raises(MlagenError) as caught:
        case_of("gqa", **{**BLOCKS, "head_dim": 128, **facts})
    assert str(caught.value) == message


E4M3_TOPK = {"dtype": "e4m3", "kv_dtype": "fp8_ds_mla", "seq_len": 8192, "top_k": 2048}
CEILINGS = Ceilings(read_gb_s=4000.0, bf16_tflop_s=800.0, fp8_tflop_s=1600.0)


@pytest.mark.parametrize(
    ("family", "facts", "ceilings", "bound_s", "bound_by"),
    [
        ("mla", {}, CEILINGS, 146_028_888_064 / 800e12, "math"),  # 128 heads share a token
        ("gqa", {}, CEILINGS, 2_151_677_952 / 4e12, "memory"),  # 8 heads share a token
        ("mla", {"dtype": "e4m3"}, CEILINGS, 146_028_888_064 / 1600e12, "math"),
        # 73 GFLOP, at the rate of bf16 above the time of memory; packed rows are e4m3 as well.
        ("mla", E4M3_TOPK, CEILINGS, 198_180_864 / 4e12, "memory"),
        # Without the FP8 rate it is that of bf16, and an e4m3 cache alone is multiplied as bf16.
        ("mla", {"dtype": "e4m3"}, replace(CEILINGS, fp8_tflop_s=None), 1.82536e-4, "math"),
        ("mla", {"kv_dtype": "e4m3"}, CEILINGS, 146_028_888_064 / 800e12, "math"),
    ],
)
def test_the_roofline_bound(
    family: str, facts: dict[str, Any], ceilings: Ceilings, bound_s: float, bound_by: str
) -> None:
    """It is the longer of the times of math and of memory."""
    case = case_of(family, **facts)
    assert ceilings.bound_us(case) == pytest.approx(bound_s * 1e6, rel=1e-5)
    assert ceilings.bound_by(case) == bound_by
