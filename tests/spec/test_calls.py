"""Tests of the kernel candidates of a call, on its own and on another architecture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlagen.errors import UnsupportedError
from mlagen.spec.arch import ARCHS, parse_arch
from mlagen.spec.calls import gqa_call_specs, mla_call_specs, specs_of_variant, specs_on_arch
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
from mlagen.spec.families import specs_of
from mlagen.spec.gqa.sm80 import GqaVariant
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.variant import MlaVariant
from tests.kernels import (
    COMBINE,
    SM_80,
    SM_90A,
    gqa_sm80,
    gqa_sm90,
    mla_sm80,
    mla_sm90,
    mla_sm90_fp8,
    mla_sm90_fp8kv,
)

SM_120F = parse_arch("sm_120f")
MLA = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16)
E4M3 = MlaVariant(query_dtype=DType.E4M3, kv_dtype=DType.E4M3)
GQA = GqaVariant(query_dtype=DType.BF16, kv_dtype=DType.E4M3, out_dtype=DType.E4M3)


def combine(arch: str = "sm_90a", dtype: DType = DType.BF16, dim: int = 512) -> CombineSpec:
    """Return a combine kernel."""
    return CombineSpec(arch=parse_arch(arch), dtype=dtype, head_dim_vo=dim)


def test_an_mla_call_on_sm_90a_uses_sm90_or_sm80() -> None:
    """Candidates are the sm90 tiles, the smaller one for little work too, and the sm80 kernel."""
    assert mla_call_specs(SM_90A, MLA, 128) == [
        mla_sm90(rows=128),
        mla_sm90(rows=16),
        mla_sm80(rows=128),
        combine(),
    ]


def test_an_fp8_mla_call_uses_the_fp8_kernel() -> None:
    """Candidates are the FP8 kernel, the one with P in 16 bits, and the sm80 kernel."""
    dtypes: dict[str, Any] = {"query_dtype": DType.E4M3, "kv_dtype": DType.E4M3}

    assert mla_call_specs(SM_90A, E4M3, 16) == [
        mla_sm90_fp8(),
        mla_sm90_fp8kv(**dtypes, lookup="paged", rows=16),
        mla_sm80(**dtypes),
        combine(),
    ]


def test_an_mla_call_without_an_sm90_kernel_uses_sm80() -> None:
    """Other architectures, and head dims that no sm90 kernel supports, use the sm80 kernel."""
    elsewhere = mla_call_specs(SM_80, MLA, 16)
    other = mla_call_specs(SM_90A, replace(MLA, kv_lora_rank=256), 16)

    assert elsewhere == [mla_sm80(arch=SM_80), combine("sm_80")]
    assert other == [mla_sm80(kv_lora_rank=256), combine(dim=256)]


def test_an_mla_call_with_an_fp8_kv_cache_uses_the_fp8kv_kernel() -> None:
    """Candidates are the FP8-KV kernel and the sm80 kernel."""
    mixed = mla_call_specs(SM_90A, replace(MLA, kv_dtype=DType.E4M3), 16)

    fp8kv = mla_sm90_fp8kv(kv_dtype=DType.E4M3, lookup="paged", rows=16)
    assert mixed == [fp8kv, mla_sm80(kv_dtype=DType.E4M3), combine()]


def test_a_gqa_call_uses_its_kernels_and_a_combine_in_the_output_dtype() -> None:
    """Candidates on sm_90a are one sm90 kernel per number of heads per CTA, and the sm80 kernel."""
    dtypes: dict[str, Any] = {"kv_dtype": DType.E4M3, "out_dtype": DType.E4M3}
    combine_e4m3 = combine(dtype=DType.E4M3, dim=128)

    assert gqa_call_specs(SM_90A, GQA, 4) == [
        gqa_sm90(**dtypes),
        gqa_sm90(heads_per_cta=2, **dtypes),
        gqa_sm80(**dtypes),
        combine_e4m3,
    ]


def test_a_gqa_call_without_an_sm90_kernel_uses_sm80() -> None:
    """Unsupported dtypes, and other architectures, use the sm80 kernel."""
    int8 = replace(GQA, kv_dtype=DType.INT8, out_dtype=DType.BF16)

    assert gqa_call_specs(SM_90A, int8, 4) == [gqa_sm80(kv_dtype=DType.INT8), combine(dim=128)]
    assert gqa_call_specs(SM_80, replace(GQA, out_dtype=DType.BF16), 4) == [
        gqa_sm80(arch=SM_80, kv_dtype=DType.E4M3),
        combine("sm_80", dim=128),
    ]


def test_an_unsupported_call_has_no_candidates() -> None:
    """The error is that of the call itself."""
    with pytest.raises(UnsupportedError, match=r"^no MLA decode kernel for query bf16, cache int8"):
        mla_call_specs(SM_80, MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.INT8), 16)


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (mla_sm80(), {16, 32, 64}),
        (mla_sm90(), {16, 32, 64}),
        (mla_sm90_fp8(), {16, 32, 64}),
        (gqa_sm80(), {16, 32}),
        (gqa_sm90(), {8, 16, 32}),
    ],
    ids=lambda value: getattr(value, "family", ""),
)
def test_specs_of_a_variant_have_every_tile(spec: KernelSpec, sizes: set[int]) -> None:
    """Each tile occurs once, and every kernel is of the same family."""
    specs = specs_of_variant(spec)

    assert spec in specs
    assert {int(other.key_fields()["block_m"]) for other in specs} == sizes
    assert {other.family for other in specs} == {spec.family}
    assert len(set(specs)) == len(specs)


@pytest.mark.parametrize(
    ("spec", "arch", "expected"),
    [
        (mla_sm80(), SM_80, [mla_sm80(arch=SM_80), combine("sm_80")]),
        (
            mla_sm90(rows=32),
            SM_80,
            [mla_sm80(arch=SM_80, rows=32), combine("sm_80")],
        ),
        (
            mla_sm80(arch=SM_80),
            SM_90A,
            [mla_sm90(), mla_sm80(), combine()],
        ),
        (COMBINE, SM_90A, [combine()]),
        (
            gqa_sm80(arch=SM_80, rows=32),
            SM_90A,
            [gqa_sm90(rows=32), gqa_sm80(rows=32), combine(dim=128)],
        ),
    ],
    ids=["sm80", "from sm_90a", "to sm_90a", "combine", "gqa"],
)
def test_specs_on_another_arch(spec: KernelSpec, arch: object, expected: object) -> None:
    """The kernels are those that the calls use there, not the same tile compiled for it."""
    assert specs_on_arch(spec, arch) == expected  # type: ignore[arg-type]


def test_one_tile_maps_to_several_tiles_of_another_arch() -> None:
    """The largest tile of an arch with little shared memory covers several tiles elsewhere."""
    widest = mla_sm80(arch=SM_120F, rows=64)

    elsewhere = specs_on_arch(widest, SM_80)

    assert widest.tile.block_m == 16
    assert mla_sm80(arch=SM_80, rows=64) in elsewhere
    assert mla_sm80(arch=SM_80, rows=32) in elsewhere
    assert mla_sm80(arch=SM_80, rows=16) in elsewhere


def test_every_kernel_maps_to_itself_on_its_own_arch() -> None:
    """The candidates on a kernel's own architecture include the kernel."""
    specs = [spec for arch in ARCHS for spec in specs_of(arch)]

    assert [spec for spec in specs if spec not in specs_on_arch(spec, spec.arch)] == []
