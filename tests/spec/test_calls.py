"""Calls: every kernel that one may take, here and on another architecture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlagen.errors import UnsupportedError
from mlagen.spec.arch import ARCHS, parse_arch
from mlagen.spec.calls import gqa_call_specs, mla_call_specs, specs_beside, specs_elsewhere
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
from mlagen.spec.families import specs_of
from mlagen.spec.gqa import GqaVariant
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla_support import MlaVariant
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
    """Return a combining kernel."""
    return CombineSpec(arch=parse_arch(arch), dtype=dtype, head_dim_vo=dim)


def test_an_mla_call_on_hopper_may_take_either_kernel() -> None:
    """The Hopper one, with fewer rows if there is little to do, or the portable one."""
    assert mla_call_specs(SM_90A, MLA, 128) == [
        mla_sm90(rows=128),
        mla_sm90(rows=16),
        mla_sm80(rows=128),
        combine(),
    ]


def test_an_mla_call_in_e4m3_may_take_a_kernel_of_its_own() -> None:
    """Or one that keeps p_dtype_choice in 16 bits, or the portable one."""
    dtypes: dict[str, Any] = {"query_dtype": DType.E4M3, "kv_dtype": DType.E4M3}

    assert mla_call_specs(SM_90A, E4M3, 16) == [
        mla_sm90_fp8(),
        mla_sm90_fp8kv(**dtypes, lookup="paged", rows=16),
        mla_sm80(**dtypes),
        combine(),
    ]


def test_an_mla_call_elsewhere_takes_the_portable_kernel() -> None:
    """So does a call on Hopper with dims that no sm90 kernel knows."""
    elsewhere = mla_call_specs(SM_80, MLA, 16)
    other = mla_call_specs(SM_90A, replace(MLA, kv_lora_rank=256), 16)

    assert elsewhere == [mla_sm80(arch=SM_80), combine("sm_80")]
    assert other == [mla_sm80(kv_lora_rank=256), combine(dim=256)]


def test_an_mla_call_over_rows_of_8_bits_may_take_a_kernel_that_converts_them() -> None:
    """Or the portable one."""
    mixed = mla_call_specs(SM_90A, replace(MLA, kv_dtype=DType.E4M3), 16)

    converting = mla_sm90_fp8kv(kv_dtype=DType.E4M3, lookup="paged", rows=16)
    assert mixed == [converting, mla_sm80(kv_dtype=DType.E4M3), combine()]


def test_a_gqa_call_takes_its_kernels_and_the_one_that_combines_its_output() -> None:
    """In the dtype that is written: on Hopper one for each number of heads, and the portable."""
    dtypes: dict[str, Any] = {"kv_dtype": DType.E4M3, "out_dtype": DType.E4M3}
    combining = combine(dtype=DType.E4M3, dim=128)

    assert gqa_call_specs(SM_90A, GQA, 4) == [
        gqa_sm90(**dtypes),
        gqa_sm90(heads_per_cta=2, **dtypes),
        gqa_sm80(**dtypes),
        combining,
    ]


def test_a_gqa_call_that_hopper_does_not_cover_takes_the_portable_kernel() -> None:
    """So does one on another architecture."""
    int8 = replace(GQA, kv_dtype=DType.INT8, out_dtype=DType.BF16)

    assert gqa_call_specs(SM_90A, int8, 4) == [gqa_sm80(kv_dtype=DType.INT8), combine(dim=128)]
    assert gqa_call_specs(SM_80, replace(GQA, out_dtype=DType.BF16), 4) == [
        gqa_sm80(arch=SM_80, kv_dtype=DType.E4M3),
        combine("sm_80", dim=128),
    ]


def test_a_call_without_a_kernel_is_rejected() -> None:
    """As the call itself would be."""
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
def test_beside_a_kernel_stand_those_of_other_tiles(spec: KernelSpec, sizes: set[int]) -> None:
    """Each once, and no kernel of another family."""
    beside = specs_beside(spec)

    assert spec in beside
    assert {int(other.key_fields()["block_m"]) for other in beside} == sizes
    assert {other.family for other in beside} == {spec.family}
    assert len(set(beside)) == len(beside)


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
    ids=["sm80", "from Hopper", "to Hopper", "combining", "gqa"],
)
def test_the_same_calls_elsewhere(spec: KernelSpec, arch: object, expected: object) -> None:
    """The kernels are those that the calls take there, not the same tile compiled for it."""
    assert specs_elsewhere(spec, arch) == expected  # type: ignore[arg-type]


def test_what_one_tile_serves_may_be_served_by_several_elsewhere() -> None:
    """With little shared memory the widest tile is narrow, and serves what is wide elsewhere."""
    widest = mla_sm80(arch=SM_120F, rows=64)

    elsewhere = specs_elsewhere(widest, SM_80)

    assert widest.tile.block_m == 16
    assert mla_sm80(arch=SM_80, rows=64) in elsewhere
    assert mla_sm80(arch=SM_80, rows=32) in elsewhere
    assert mla_sm80(arch=SM_80, rows=16) in elsewhere


def test_every_kernel_has_calls_on_its_own_architecture() -> None:
    """Taken there, the calls of a kernel lead back to it."""
    specs = [spec for arch in ARCHS for spec in specs_of(arch)]

    assert [spec for spec in specs if spec not in specs_elsewhere(spec, spec.arch)] == []
