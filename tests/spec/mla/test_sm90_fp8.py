"""Tests of the FP8 sm90 MLA specs: covered calls and tile selection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlagen.spec.arch import ARCHS
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import CallShape
from mlagen.spec.mla.sm90 import MlaSm90Spec
from mlagen.spec.mla.sm90_calls import mla_sm90_kernel
from mlagen.spec.mla.sm90_fp8 import mla_sm90_fp8_spec, mla_sm90_fp8_specs
from mlagen.spec.mla.variant import MlaVariant
from tests.kernels import SM_90A, mla_sm90, mla_sm90_fp8, mla_sm90_fp8kv

E4M3 = MlaVariant(query_dtype=DType.E4M3, kv_dtype=DType.E4M3)


@pytest.mark.parametrize(
    ("rows", "block_m"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (512, 64)]
)
def test_a_call_uses_the_smallest_tile_that_holds_its_rows(rows: int, block_m: int) -> None:
    """If none holds them, the call uses the largest tile."""
    assert mla_sm90_fp8(rows=rows).block_m == block_m


NOT_COVERED: dict[str, dict[str, Any]] = {
    "bf16": {"query_dtype": DType.BF16, "kv_dtype": DType.BF16},
    "another query": {"query_dtype": DType.BF16},
    "another rank": {"kv_lora_rank": 256},
    "sparse": {"lookup": "sparse"},
    "separate values": {"values": "separate"},
    "a bias": {"mask": "bias"},
    "pages of 8": {"page_size": 8},
    "pages of 24": {"page_size": 24},
}


@pytest.mark.parametrize("changes", NOT_COVERED.values(), ids=NOT_COVERED)
def test_an_unsupported_call_has_no_fp8_kernel(changes: dict[str, Any]) -> None:
    """The spec of an unsupported call is None."""
    assert mla_sm90_fp8_spec(SM_90A, replace(E4M3, **changes), 16) is None


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 80, 128])
def test_pages_are_whole_tma_boxes(page_size: int) -> None:
    """A TMA box lies in one page, and whole boxes make a KV block of 64 tokens."""
    spec = mla_sm90_fp8(page_size=page_size)

    assert page_size % spec.box_tokens == 0
    assert 64 % spec.box_tokens == 0
    assert spec.box_tokens >= 16


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_only_sm_90a_has_fp8_kernels(arch: Any) -> None:
    """Three tiles for each default page size are listed once."""
    specs = list(mla_sm90_fp8_specs(arch))

    pages = {spec.variant.page_size for spec in specs}
    assert pages == ({16, 32, 64, 128} if arch.has_wgmma else set())
    assert len(specs) == len(set(specs)) == 3 * len(pages)


@pytest.mark.parametrize(("heads", "block_m"), [(8, [16]), (16, [16, 32]), (64, [16, 32, 64])])
def test_a_call_matches_its_tiles(heads: int, block_m: list[int]) -> None:
    """A call uses the tile of its rows, or a smaller one for little work."""
    call = CallShape(heads=heads, q_len=2)

    serving = [rows for rows in (16, 32, 64) if mla_sm90_fp8(rows=rows).serves(call)]

    assert serving == block_m


def test_ctas_wait_for_each_other() -> None:
    """The kernel is cooperative."""
    spec = mla_sm90_fp8()

    assert spec.is_cooperative
    assert spec.uses_semaphores
    assert spec.threads == 512
    assert (spec.head_dim_qk, spec.head_dim_vo) == (576, 512)


def test_it_has_the_parameters_of_the_16_bit_kernel() -> None:
    """Both kernels have the same parameters."""
    assert mla_sm90_fp8().parameters == MlaSm90Spec.parameters


@pytest.mark.parametrize(
    ("dtype", "p_dtype_choice", "expected"),
    [
        (DType.BF16, "auto", mla_sm90()),
        (DType.BF16, "fp16", mla_sm90()),
        (DType.E4M3, "auto", mla_sm90_fp8()),
        (
            DType.E4M3,
            "fp16",
            mla_sm90_fp8kv(query_dtype=DType.E4M3, kv_dtype=DType.E4M3, lookup="paged", rows=16),
        ),
    ],
)
def test_a_call_uses_at_most_one_sm90_kernel(
    dtype: DType, p_dtype_choice: str, expected: Any
) -> None:
    """Its dtypes and p_dtype_choice select the kernel."""
    variant = MlaVariant(query_dtype=dtype, kv_dtype=dtype)
    other = replace(variant, kv_lora_rank=256)

    assert mla_sm90_kernel(SM_90A, variant, 16, p_dtype_choice) == expected
    assert mla_sm90_kernel(SM_90A, other, 16, p_dtype_choice) is None
