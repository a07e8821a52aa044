"""Kernel candidates of a call, on its own architecture and on another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlagen.errors import UnsupportedError
from mlagen.spec.arch import ARCHS, Arch, parse_arch
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
from mlagen.spec.families import (
    gqa_call_specs,
    mla_call_specs,
    specs_of,
    specs_of_variant,
    specs_on_arch,
)
from mlagen.spec.gqa.variant import GqaVariant
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.sm90 import mla_sm90_kernel
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

BF16 = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16)
E4M3: dict[str, Any] = {"query_dtype": DType.E4M3, "kv_dtype": DType.E4M3}
MIXED: dict[str, Any] = {"kv_dtype": DType.E4M3}
GQA = GqaVariant(query_dtype=DType.BF16, kv_dtype=DType.E4M3, out_dtype=DType.E4M3)
TO_E4M3: dict[str, Any] = {"kv_dtype": DType.E4M3, "out_dtype": DType.E4M3}
SCALED: dict[str, Any] = {"kv_dtype": DType.INT8_PER_TOKEN_HEAD, "out_dtype": DType.BF16}

FP8KV_OF_E4M3 = mla_sm90_fp8kv(**E4M3, lookup="paged", rows=16)


def combine(arch: str = "sm_90a", dtype: DType = DType.BF16, dim: int = 512) -> CombineSpec:
    """Return a combine kernel."""
    return CombineSpec(arch=parse_arch(arch), dtype=dtype, head_dim_vo=dim)


CANDIDATES: dict[str, tuple[Any, Arch, Any, int, list[KernelSpec]]] = {
    # The sm90 tiles, the smaller one for little work too, and the sm80 kernel.
    "bf16": (
        *(mla_call_specs, SM_90A, BF16, 128),
        [mla_sm90(rows=128), mla_sm90(rows=16), mla_sm80(rows=128), combine()],
    ),
    # The FP8 kernel, the one with P in 16 bits, and the sm80 kernel.
    "e4m3": (
        *(mla_call_specs, SM_90A, replace(BF16, **E4M3), 16),
        [mla_sm90_fp8(), FP8KV_OF_E4M3, mla_sm80(**E4M3), combine()],
    ),
    "bf16 over e4m3": (
        *(mla_call_specs, SM_90A, replace(BF16, **MIXED), 16),
        [mla_sm90_fp8kv(**MIXED, lookup="paged", rows=16), mla_sm80(**MIXED), combine()],
    ),
    # Other architectures, and head dims that no sm90 kernel supports.
    "sm_80": (mla_call_specs, SM_80, BF16, 16, [mla_sm80(arch=SM_80), combine("sm_80")]),
    "rank 256": (
        *(mla_call_specs, SM_90A, replace(BF16, kv_lora_rank=256), 16),
        [mla_sm80(kv_lora_rank=256), combine(dim=256)],
    ),
    # One sm90 kernel per number of KV heads per CTA; a combine in the output dtype.
    "GQA, e4m3": (
        *(gqa_call_specs, SM_90A, GQA, 4),
        [
            *(gqa_sm90(**TO_E4M3), gqa_sm90(kv_heads_per_cta=2, **TO_E4M3)),
            *(gqa_sm80(**TO_E4M3), combine(dtype=DType.E4M3, dim=128)),
        ],
    ),
    "GQA, int8": (
        *(gqa_call_specs, SM_90A, replace(GQA, kv_dtype=DType.INT8, out_dtype=DType.BF16), 4),
        [
            *(gqa_sm90(kv_dtype=DType.INT8, kv_heads_per_cta=heads) for heads in (1, 2)),
            *(gqa_sm80(kv_dtype=DType.INT8), combine(dim=128)),
        ],
    ),
    "GQA, scales of tokens": (
        *(gqa_call_specs, SM_90A, replace(GQA, **SCALED), 4),
        [
            *(gqa_sm90(**SCALED), gqa_sm90(**SCALED, kv_heads_per_cta=2)),
            gqa_sm90(**SCALED, has_unaligned_rows=True),
            *(gqa_sm80(kv_dtype=DType.INT8_PER_TOKEN_HEAD), combine(dim=128)),
        ],
    ),
    "GQA, nvfp4": (
        *(gqa_call_specs, SM_90A, replace(GQA, kv_dtype=DType.NVFP4, out_dtype=DType.BF16), 4),
        [
            *(gqa_sm90(kv_dtype=DType.NVFP4, kv_heads_per_cta=heads) for heads in (1, 2, 4)),
            *(gqa_sm80(kv_dtype=DType.NVFP4), combine(dim=128)),
        ],
    ),
    "GQA, sm_80": (
        *(gqa_call_specs, SM_80, replace(GQA, out_dtype=DType.BF16), 4),
        [gqa_sm80(arch=SM_80, kv_dtype=DType.E4M3), combine("sm_80", dim=128)],
    ),
}


@pytest.mark.parametrize(
    ("specs_of_call", "arch", "variant", "rows", "expected"), CANDIDATES.values(), ids=CANDIDATES
)
def test_candidates_of_a_call(
    specs_of_call: Any, arch: Arch, variant: Any, rows: int, expected: list[KernelSpec]
) -> None:
    """The sm90 kernels come first if any, then the sm80 kernel and its combine."""
    assert specs_of_call(arch, variant, rows) == expected


@pytest.mark.parametrize(
    ("changes", "p_dtype_choice", "expected"),
    [
        *(({}, "auto", mla_sm90()), ({}, "fp16", mla_sm90())),
        *((E4M3, "auto", mla_sm90_fp8()), (E4M3, "fp16", FP8KV_OF_E4M3)),
        *(({"kv_lora_rank": 256}, choice, None) for choice in ("auto", "fp16")),
        *((E4M3 | {"kv_lora_rank": 256}, choice, None) for choice in ("auto", "fp16")),
    ],
)
def test_a_call_uses_at_most_one_sm90_mla_kernel(
    changes: dict[str, Any], p_dtype_choice: str, expected: KernelSpec | None
) -> None:
    """Its dtypes and p_dtype_choice select the kernel, if any covers it."""
    assert mla_sm90_kernel(SM_90A, replace(BF16, **changes), 16, p_dtype_choice) == expected


def test_an_unsupported_call_has_no_candidates() -> None:
    """The error is that of the call itself."""
    with pytest.raises(UnsupportedError, match=r"^no MLA decode kernel for query bf16, cache int8"):
        mla_call_specs(SM_80, replace(BF16, kv_dtype=DType.INT8), 16)


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


ON_ANOTHER_ARCH: dict[str, tuple[KernelSpec, Arch, list[KernelSpec]]] = {
    "sm80": (mla_sm80(), SM_80, [mla_sm80(arch=SM_80), combine("sm_80")]),
    "from sm_90a": (mla_sm90(rows=32), SM_80, [mla_sm80(arch=SM_80, rows=32), combine("sm_80")]),
    "to sm_90a": (mla_sm80(arch=SM_80), SM_90A, [mla_sm90(), mla_sm80(), combine()]),
    "combine": (COMBINE, SM_90A, [combine()]),
    "gqa": (
        *(gqa_sm80(arch=SM_80, rows=32), SM_90A),
        [gqa_sm90(rows=32), gqa_sm80(rows=32), combine(dim=128)],
    ),
}


@pytest.mark.parametrize(
    ("spec", "arch", "expected"), ON_ANOTHER_ARCH.values(), ids=ON_ANOTHER_ARCH
)
def test_specs_on_another_arch(spec: KernelSpec, arch: Arch, expected: list[KernelSpec]) -> None:
    """The kernels are those that the calls use there, not the same tile compiled for it."""
    assert specs_on_arch(spec, arch) == expected


def test_one_tile_maps_to_several_tiles_of_another_arch() -> None:
    """The largest tile of an arch with little shared memory covers several tiles elsewhere."""
    widest = mla_sm80(arch=parse_arch("sm_120f"), rows=64)

    elsewhere = specs_on_arch(widest, SM_80)

    assert widest.tile.block_m == 16
    assert {mla_sm80(arch=SM_80, rows=rows) for rows in (16, 32, 64)} <= set(elsewhere)


def test_kernels_map_to_themselves_on_their_own_arch() -> None:
    """The candidates on a kernel's own architecture include the kernel."""
    specs = [spec for arch in ARCHS for spec in specs_of(arch)[::7]]

    assert [spec for spec in specs if spec not in specs_on_arch(spec, spec.arch)] == []
