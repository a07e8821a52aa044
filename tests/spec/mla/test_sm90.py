"""Tests of the sm90 MLA specs: covered calls and tile selection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlagen.spec.arch import ARCHS
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import CallShape
from mlagen.spec.mla.sm90 import (
    MlaSm90Spec,
    block_m_for,
    mla_sm90_spec,
    mla_sm90_specs,
)
from mlagen.spec.mla.variant import SUPPORTED, MlaVariant
from tests.kernels import SM_90A, mla_sm80, mla_sm90

BF16 = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16)


@pytest.mark.parametrize(
    ("rows", "block_m"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (512, 64)]
)
def test_a_call_uses_the_smallest_tile_that_holds_its_rows(rows: int, block_m: int) -> None:
    """If none holds them, the call uses the largest tile."""
    assert block_m_for(rows) == mla_sm90(rows=rows).block_m == block_m


NOT_COVERED: dict[str, dict[str, Any]] = {
    "e4m3": {"query_dtype": DType.E4M3, "kv_dtype": DType.E4M3},
    "another cache": {"kv_dtype": DType.E4M3},
    "another rank": {"kv_lora_rank": 256},
    "no rope": {"qk_rope_head_dim": 0},
    "sparse": {"lookup": "sparse"},
    "separate values": {"values": "separate"},
    "a bias": {"mask": "bias"},
    "pages of 8": {"page_size": 8},
    "pages of 24": {"page_size": 24},
}


@pytest.mark.parametrize("changes", NOT_COVERED.values(), ids=NOT_COVERED)
def test_an_unsupported_call_has_no_sm90_kernel(changes: dict[str, Any]) -> None:
    """The spec of an unsupported call is None."""
    assert mla_sm90_spec(SM_90A, replace(BF16, **changes), 16) is None


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 80, 128])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_pages_are_whole_tma_boxes(dtype: DType, page_size: int) -> None:
    """A TMA box lies in one page, and whole boxes make a KV block of 64 tokens."""
    spec = mla_sm90(query_dtype=dtype, kv_dtype=dtype, page_size=page_size)

    assert page_size % spec.box_tokens == 0
    assert 64 % spec.box_tokens == 0
    assert spec.box_tokens >= 16


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_only_sm_90a_has_sm90_kernels(arch: Any) -> None:
    """Every supported variant that the kernel covers is listed once."""
    specs = list(mla_sm90_specs(arch))

    variants = {variant for row in SUPPORTED for variant in row.variants()}
    expected = {
        MlaSm90Spec(arch=arch, variant=variant, block_m=rows)
        for variant in variants
        for rows in (64, 32, 16)
        if mla_sm90_spec(arch, variant, rows) is not None
    }
    assert set(specs) == expected
    assert len(specs) == len(expected) == (24 if arch == SM_90A else 0)


@pytest.mark.parametrize(
    ("heads", "block_m"), [(8, [16]), (16, [16, 32]), (24, [16, 64]), (128, [16, 64])]
)
def test_a_kernel_matches_the_calls_of_its_tiles(heads: int, block_m: list[int]) -> None:
    """Prewarming for heads and query tokens selects the tiles of the calls, small ones included."""
    call = CallShape(heads=heads, q_len=2)

    serving = [rows for rows in (16, 32, 64) if mla_sm90(rows=rows).serves(call)]

    assert serving == block_m


def test_ctas_wait_for_each_other() -> None:
    """The sm90 kernel is cooperative; the sm80 kernel is not."""
    assert mla_sm90().is_cooperative
    assert not mla_sm80().is_cooperative
