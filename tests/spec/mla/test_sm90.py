"""The specs of the sm90 MLA kernels: covered calls, tiles and counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import CallShape
from mlagen.spec.mla.sm90 import block_m_for, mla_sm90_spec, mla_sm90_specs
from mlagen.spec.mla.sm90_calls import mla_sm90_kernel
from mlagen.spec.mla.sm90_fp8 import mla_sm90_fp8_spec, mla_sm90_fp8_specs
from mlagen.spec.mla.sm90_fp8kv import mla_sm90_fp8kv_spec, mla_sm90_fp8kv_specs
from mlagen.spec.mla.variant import PAGE_SIZES, MlaVariant
from tests.kernels import SM_90A, mla_sm80, mla_sm90, mla_sm90_fp8, mla_sm90_fp8kv

BF16 = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16)
E4M3 = MlaVariant(query_dtype=DType.E4M3, kv_dtype=DType.E4M3)
PACKED = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.FP8_DS_MLA)
MIXED = replace(PACKED, kv_dtype=DType.E4M3)


class Family(NamedTuple):
    """The functions of a family, a variant, and how many kernels an sm_90a has."""

    variant: MlaVariant
    spec_of: Callable[..., Any]
    specs: Callable[[Arch], Any]
    kernels: int
    build: Callable[..., Any]


FAMILIES = {
    # Two dtypes, with rope or without, three tiles: two masks in four page sizes, and top-k indices
    # in all.
    "mla_sm90": Family(
        BF16, mla_sm90_spec, mla_sm90_specs, 2 * 2 * 3 * (2 * 4 + len(PAGE_SIZES)), mla_sm90
    ),
    "mla_sm90_fp8": Family(
        E4M3, mla_sm90_fp8_spec, mla_sm90_fp8_specs, 2 * 2 * 4 * 3, mla_sm90_fp8
    ),
    # Four dtype pairs have two dims and three modes, fp8_per_token has one; three tiles each.
    "mla_sm90_fp8kv": Family(
        PACKED,
        mla_sm90_fp8kv_spec,
        mla_sm90_fp8kv_specs,
        (4 * 2 * 3 + 1) * 3 * len(PAGE_SIZES),
        mla_sm90_fp8kv,
    ),
}
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
whole_boxes = pytest.mark.parametrize("family", list(FAMILIES.values())[:2], ids=list(FAMILIES)[:2])

NO_KERNEL: list[dict[str, Any]] = [
    *({"kv_lora_rank": 256}, {"values": "separate"}, {"mask": "bias"}),
    *({"page_size": 8}, {"page_size": 24}),
]
NOT_COVERED: dict[str, list[dict[str, Any]]] = {
    "mla_sm90": [
        *(*NO_KERNEL, {"kv_dtype": DType.E4M3}),
        *({"lookup": "sparse", **change} for change in ({"kv_lora_rank": 256}, {"mask": "bias"})),
    ],
    "mla_sm90_fp8": [*NO_KERNEL, {"query_dtype": DType.BF16}, {"lookup": "sparse"}],
    "mla_sm90_fp8kv": [
        *({"kv_dtype": DType.BF16}, {"query_dtype": DType.FP16}),
        *(
            {"kv_dtype": DType.E4M3, **change}
            for change in ({"kv_lora_rank": 256}, {"mask": "bias"}, {"values": "separate"})
        ),
    ],
}


@families
@pytest.mark.parametrize(
    ("rows", "block_m"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (512, 64)]
)
def test_a_call_uses_the_smallest_tile_that_holds_its_rows(
    family: Family, rows: int, block_m: int
) -> None:
    """If none holds them, the call uses the largest tile."""
    assert block_m_for(rows) == family.build(rows=rows).block_m == block_m


@pytest.mark.parametrize(
    ("name", "changes"), [(name, changes) for name, rows in NOT_COVERED.items() for changes in rows]
)
def test_an_unsupported_call_has_no_sm90_kernel(name: str, changes: dict[str, Any]) -> None:
    """The spec of an unsupported call is None."""
    family = FAMILIES[name]

    assert family.spec_of(SM_90A, replace(family.variant, **changes), 16) is None


@pytest.mark.parametrize(
    "variant",
    [
        PACKED,
        replace(PACKED, lookup="sparse", page_size=3),
        MIXED,
        replace(MIXED, lookup="sparse"),
        E4M3,
        replace(PACKED, query_dtype=DType.E4M3),
        replace(PACKED, query_dtype=DType.FP8_PER_TOKEN, kv_dtype=DType.FP8_PER_TOKEN),
    ],
    ids=["packed", "sparse", "mixed", "mixed, sparse", "e4m3", "e4m3, packed", "per token"],
)
def test_an_fp8_kv_cache_has_an_fp8kv_kernel(variant: MlaVariant) -> None:
    """Dense calls with pages of any size and sparse calls are covered."""
    assert mla_sm90_fp8kv_spec(SM_90A, variant, 16) is not None


@whole_boxes
@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 80, 128])
def test_pages_are_whole_tma_boxes(family: Family, page_size: int) -> None:
    """A TMA box lies in one page, and whole boxes make a KV block of 64 tokens."""
    spec = family.build(page_size=page_size)

    assert page_size % spec.box_tokens == 64 % spec.box_tokens == 0
    assert spec.box_tokens >= 16


@families
@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_only_sm_90a_has_sm90_kernels(family: Family, arch: Arch) -> None:
    """Every kernel is listed once."""
    specs = list(family.specs(arch))

    assert len(specs) == len(set(specs)) == (family.kernels if arch == SM_90A else 0)


@whole_boxes
@pytest.mark.parametrize(("heads", "largest"), [(8, 16), (16, 32), (24, 64), (128, 64)])
def test_a_kernel_matches_the_calls_of_its_tiles(family: Family, heads: int, largest: int) -> None:
    """Prewarming for heads and query tokens selects the tiles of the calls, small ones included."""
    call = CallShape(heads=heads, q_len=2)

    serving = [rows for rows in (16, 32, 64) if family.build(rows=rows).serves(call)]

    small = [16] if family.variant is BF16 else [16, 32]
    assert serving == sorted({*(rows for rows in small if rows < largest), largest})


def test_a_sparse_query_token_is_a_sequence() -> None:
    """The rows of a sparse call are its heads."""
    call = CallShape(heads=16, q_len=4)

    assert mla_sm90_fp8kv(rows=16).serves(call)
    assert mla_sm90_fp8kv(rows=64, lookup="paged").serves(call)
    assert mla_sm90(rows=16, lookup="sparse").serves(call)
    assert not mla_sm90(rows=64, lookup="sparse").serves(call)


@families
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_a_cta_occupies_an_sm_and_waits_for_others(family: Family, rows: int) -> None:
    """The kernels are cooperative, unlike the sm80 kernel, and have most of its shared memory."""
    spec = family.build(rows=rows)

    assert spec.is_cooperative
    assert spec.uses_semaphores
    assert not mla_sm80().is_cooperative
    assert (spec.head_dim_qk, spec.head_dim_vo) == (576, 512)
    # With FP8: eight PV warps, four QK warps and four producer warps.
    assert family.variant is BF16 or spec.threads == 512
    assert family.variant is E4M3 or spec.shared_bytes == mla_sm90(rows=rows).shared_bytes
    assert SM_90A.shared_bytes // 2 < spec.shared_bytes <= SM_90A.shared_bytes


def test_parameters_are_shared() -> None:
    """The FP8 kernel has those of the 16-bit kernel; over lists that has some of the FP8-KV one."""
    assert mla_sm90_fp8().parameters == mla_sm90().parameters
    lists = mla_sm90(lookup="sparse").parameters
    assert set(lists) < set(mla_sm90_fp8kv().parameters)
    assert not {"latent_map", "separate_rope"} & {parameter.name for parameter in lists}


@pytest.mark.parametrize(
    ("variant", "p_dtype_choice", "expected"),
    [
        (BF16, "auto", mla_sm90()),
        (BF16, "fp16", mla_sm90()),
        (E4M3, "auto", mla_sm90_fp8()),
        (E4M3, "fp16", mla_sm90_fp8kv(**vars(E4M3), rows=16)),
    ],
)
def test_a_call_uses_at_most_one_sm90_kernel(
    variant: MlaVariant, p_dtype_choice: str, expected: Any
) -> None:
    """Its dtypes and p_dtype_choice select the kernel."""
    other = replace(variant, kv_lora_rank=256)

    assert mla_sm90_kernel(SM_90A, variant, 16, p_dtype_choice) == expected
    assert mla_sm90_kernel(SM_90A, other, 16, p_dtype_choice) is None
