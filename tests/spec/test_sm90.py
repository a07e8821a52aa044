"""The specs of the sm90 kernels: covered calls, tiles and counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest

from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.dtype import DType
from mlagen.spec.families import specs_of
from mlagen.spec.gqa import sm90 as gqa
from mlagen.spec.gqa.variant import HEAD_DIMS, GqaVariant
from mlagen.spec.kernel import CallShape
from mlagen.spec.mla.sm90 import (
    MlaSm90Fp8KvSpec,
    MlaSm90Fp8Spec,
    MlaSm90Spec,
    block_m_for,
)
from mlagen.spec.mla.variant import PAGE_SIZES, MlaVariant
from tests.kernels import SM_90A, gqa_sm90, mla_sm80, mla_sm90, mla_sm90_fp8, mla_sm90_fp8kv

BF16 = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16)
E4M3 = MlaVariant(query_dtype=DType.E4M3, kv_dtype=DType.E4M3)
FP8_DS_MLA = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.FP8_DS_MLA)
MIXED = replace(FP8_DS_MLA, kv_dtype=DType.E4M3)
GQA = GqaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16, out_dtype=DType.BF16)


class Family(NamedTuple):
    """The functions of a family, a variant, and how many kernels an sm_90a has."""

    variant: Any
    spec_of: Callable[..., Any]
    kernels: int
    build: Callable[..., Any]


# Two dtypes, with rope or without, three tiles: two masks in four page sizes, and top-k indices in
# all.
_MLA_KERNELS = 2 * 2 * 3 * (2 * 4 + len(PAGE_SIZES))
# Four dtype pairs have two dims and three modes, fp8_per_token has one; three tiles each. Two pools
# of three formats have any page size.
_FP8KV_KERNELS = ((4 * 2 * 3 + 1) * len(PAGE_SIZES) + 3) * 3
# Query and cache of one dtype, or a cache of 8 bits: e4m3 with either output, e5m2 and int8; or
# NVFP4. Four page sizes; tiles of three head dims, the smallest of them for one, two or four KV
# heads per CTA.
_GQA_KERNELS = 2 * 4 * ((4 + 3 + 2) + 4 * (5 + 4 + 2) + (5 + 5 + 3))
MLA_FAMILIES = {
    "mla_sm90": Family(BF16, MlaSm90Spec.of, _MLA_KERNELS, mla_sm90),
    "mla_sm90_fp8": Family(E4M3, MlaSm90Fp8Spec.of, 2 * 2 * 4 * 3, mla_sm90_fp8),
    "mla_sm90_fp8kv": Family(FP8_DS_MLA, MlaSm90Fp8KvSpec.of, _FP8KV_KERNELS, mla_sm90_fp8kv),
}
FAMILIES = MLA_FAMILIES | {"gqa_sm90": Family(GQA, gqa.gqa_sm90_spec, _GQA_KERNELS, gqa_sm90)}
mla_families = pytest.mark.parametrize("family", MLA_FAMILIES.values(), ids=MLA_FAMILIES)
whole_boxes = pytest.mark.parametrize(
    "family", [FAMILIES["mla_sm90"], FAMILIES["mla_sm90_fp8"]], ids=["mla_sm90", "mla_sm90_fp8"]
)

NO_KERNEL: list[dict[str, Any]] = [
    *({"kv_lora_rank": 256}, {"values": "separate"}, {"mask": "bias"}),
    *({"page_size": 8}, {"page_size": 24}),
]
POOLS: dict[str, Any] = {"lookup": "two_pools", "qk_rope_head_dim": 0, "page_size": 0}
QUERIES = (DType.E4M3, DType.FP16)
NOT_COVERED: dict[str, list[dict[str, Any]]] = {
    "mla_sm90": [
        *(*NO_KERNEL, {"kv_dtype": DType.E4M3}),
        *({"lookup": "sparse", **change} for change in ({"kv_lora_rank": 256}, {"mask": "bias"})),
    ],
    "mla_sm90_fp8": [*NO_KERNEL, {"query_dtype": DType.BF16}, {"lookup": "sparse"}],
    "mla_sm90_fp8kv": [
        *({"kv_dtype": DType.BF16}, {"query_dtype": DType.FP16}),
        *({"kv_dtype": DType.E4M3, **change} for change in NO_KERNEL[:3]),
        *({"lookup": "two_pools"}, {"kv_dtype": DType.FP8_DSV4}),
        {"kv_dtype": DType.FP8_DSV41, "lookup": "two_pools"},  # with rope
        *({"kv_dtype": dtype, **POOLS} for dtype in (DType.FP8_DSV41_FP4_CA, DType.NVFP4)),
        *({"query_dtype": dtype, "kv_dtype": DType.FP8_DSV41, **POOLS} for dtype in QUERIES),
    ],
    "gqa_sm90": [
        *({"kv_dtype": DType.FP8_DS_MLA}, {"kv_dtype": DType.NVFP4, "head_dim": 192}),
        *({"page_size": 8}, {"page_size": 24}, {"head_dim": 512, "head_dim_vo": 256}),
        *({"head_dim": 272}, {"head_dim": 72}, {"head_dim": 80, "kv_dtype": DType.E4M3}),
    ],
}


@pytest.mark.parametrize(
    ("name", "changes"), [(name, changes) for name, rows in NOT_COVERED.items() for changes in rows]
)
def test_an_unsupported_call_has_no_sm90_kernel(name: str, changes: dict[str, Any]) -> None:
    """The spec of an unsupported call is None."""
    family = FAMILIES[name]

    assert family.spec_of(SM_90A, replace(family.variant, **changes), 8) is None


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_only_sm_90a_has_sm90_kernels(name: str, arch: Arch) -> None:
    """Every kernel is listed once."""
    specs = specs_of(arch, [name])

    assert len(specs) == len(set(specs)) == (FAMILIES[name].kernels if arch == SM_90A else 0)


ROWS_OF_MLA = ((1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (512, 64))
ROWS_OF_GQA = [
    *((dim, *rows) for dim in (*HEAD_DIMS, 512) for rows in ((1, 8), (8, 8), (9, 16), (16, 16))),
    *((64, 17, 32), (128, 32, 32), (128, 33, 32), (256, 17, 16), (512, 17, 16)),
]


@pytest.mark.parametrize(
    ("build", "head_dim", "rows", "block_m"),
    [
        *((family.build, None, *each) for family in MLA_FAMILIES.values() for each in ROWS_OF_MLA),
        *((gqa_sm90, *each) for each in ROWS_OF_GQA),
    ],
)
def test_a_call_uses_the_smallest_tile_that_holds_its_rows(
    build: Any, head_dim: int | None, rows: int, block_m: int
) -> None:
    """If none holds them, the call uses the largest, of GQA whose accumulators fit registers."""
    spec = build(rows=rows, **{"head_dim": head_dim} if head_dim else {})

    chosen = gqa.block_m_for(head_dim, rows) if head_dim else block_m_for(rows)
    assert chosen == spec.block_m == block_m


@pytest.mark.parametrize(
    "variant",
    [
        *(FP8_DS_MLA, replace(FP8_DS_MLA, lookup="sparse", page_size=3)),
        *(MIXED, replace(MIXED, lookup="sparse"), E4M3),
        replace(FP8_DS_MLA, query_dtype=DType.E4M3),
        replace(FP8_DS_MLA, query_dtype=DType.FP8_PER_TOKEN, kv_dtype=DType.FP8_PER_TOKEN),
    ],
    ids=["packed", "sparse", "mixed", "mixed, sparse", "e4m3", "e4m3, packed", "per token"],
)
def test_an_fp8_kv_cache_has_an_fp8kv_kernel(variant: MlaVariant) -> None:
    """Dense calls with pages of any size and sparse calls are covered."""
    assert MlaSm90Fp8KvSpec.of(SM_90A, variant, 16) is not None


WITH_BOXES: list[Callable[..., Any]] = [
    *(mla_sm90, mla_sm90_fp8),
    *(
        partial(gqa_sm90, kv_dtype=dtype, head_dim=dim)
        for dtype, dim in product((DType.BF16, DType.E4M3), (32, 96, *HEAD_DIMS, 512))
    ),
]


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("build", WITH_BOXES)
def test_tma_boxes_lie_in_a_page_and_fill_a_tile(build: Any, page_size: int) -> None:
    """One lane of a warp issues each box, and a tile is large enough for a barrier."""
    spec = build(page_size=page_size)

    assert page_size % spec.box_tokens == spec.block_n % spec.box_tokens == 0
    assert 16 <= spec.box_tokens <= 256  # the limits of a tensor map
    assert spec.block_n // spec.box_tokens <= 32


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "rows", "block_n", "combined"),
    [
        *((DType.BF16, 64, rows, 128, (rows, 64)) for rows in (8, 32)),
        *((DType.BF16, 128, rows, 128, (min(rows, 16), 128)) for rows in (8, 16, 32)),
        *((DType.BF16, 256, 8, 128, (8, 128)), (DType.BF16, 256, 16, 128, (8, 64))),
        # A converted cache has two steps in flight where registers allow.
        *((DType.E4M3, 64, 16, 256, (16, 64)), (DType.E4M3, 64, 32, 128, (32, 64))),
        (DType.E4M3, 128, 8, 256, (8, 128)),
        *((DType.E4M3, 128, rows, 128, (rows, 128)) for rows in (16, 32)),
        *((DType.E4M3, 256, rows, 128, (8, 256)) for rows in (8, 16)),
        # Half the warps take other tokens, and half the dims of these.
        *((kv, 512, rows, 64, (8, 64)) for kv in (DType.BF16, DType.E4M3) for rows in (8, 16)),
        # Rows of other bytes have the ring of the next larger ones.
        *((DType.BF16, 80, 8, 128, (8, 80)), (DType.BF16, 192, 16, 128, (8, 96))),
        *((DType.E4M3, 32, 32, 128, (32, 32)), (DType.E4M3, 96, 8, 256, (8, 96))),
    ],
)
def test_the_gqa_tiles_fill_the_shared_memory(
    kv_dtype: DType, head_dim: int, rows: int, block_n: int, combined: tuple[int, int]
) -> None:
    """The epilogue combines whole rows of eight warps where the ring leaves capacity for them."""
    spec = gqa_sm90(kv_dtype=kv_dtype, head_dim=head_dim, rows=rows)

    assert (spec.block_n, spec.combine_rows, spec.combine_dims) == (block_n, *combined)
    ring_bytes = spec.stages * spec.block_n * spec.key_row_bytes
    query_bytes = 0 if spec.keeps_query else rows * head_dim * 2
    assert spec.dim_parts == (2 if head_dim == 512 else 1)
    combined_bytes = 8 * combined[0] * (combined[1] + 6 // spec.dim_parts) * 4
    assert ring_bytes + query_bytes + combined_bytes < spec.shared_bytes
    # A producer warp, a scheduler warp and two epilogue warps besides.
    assert (spec.consumer_warps, spec.threads) == (8, 384)
    # The largest e4m3 tile has a smaller ring, so that it combines in one pass.
    is_largest_e4m3 = (kv_dtype, head_dim, rows) == (DType.E4M3, 128, 32)
    rings = {32: 48, 64: 64, 128: 80 if is_largest_e4m3 else 96, 256: 128, 512: 192, 1024: 192}
    ring = rings[min(size for size in rings if size >= spec.key_row_bytes)]
    assert spec.stages == ring * 1024 // (spec.block_n * spec.key_row_bytes)
    assert spec.stages >= 3
    assert spec.key_row_bytes % spec.line_bytes == 0


@whole_boxes
@pytest.mark.parametrize(("heads", "largest"), [(8, 16), (16, 32), (24, 64), (128, 64)])
def test_a_kernel_serves_the_calls_of_its_tiles(family: Family, heads: int, largest: int) -> None:
    """Prewarming for heads and query tokens selects the tiles of the calls, small ones included."""
    call = CallShape(heads=heads, q_len=2)

    serving = [rows for rows in (16, 32, 64) if family.build(rows=rows).serves(call)]

    small = [16] if family.variant is BF16 else [16, 32]
    assert serving == sorted({*(rows for rows in small if rows < largest), largest})


@pytest.mark.parametrize(("kv_heads", "block_m"), [(8, 8), (3, 16), (1, 32), (None, 0)])
def test_a_gqa_kernel_serves_the_calls_of_its_tile(kv_heads: int | None, block_m: int) -> None:
    """Its rows are the query tokens and heads of a KV head; without KV heads, all serve."""
    call = CallShape(heads=24, kv_heads=kv_heads, q_len=2)
    tiles = [gqa_sm90(rows=rows) for rows in (8, 16, 32)]

    assert [spec.block_m for spec in tiles if spec.serves(call)] == (
        [block_m] if block_m else [8, 16, 32]
    )


@pytest.mark.parametrize(
    ("kv_heads", "serving"), [(8, [1, 4]), (6, [1, 2]), (3, [1]), (None, [1, 2, 4])]
)
def test_a_cta_processes_one_head_or_the_max_that_divides_the_heads(
    kv_heads: int | None, serving: list[int]
) -> None:
    """The number of sequences decides between the two."""
    call = CallShape(heads=24, kv_heads=kv_heads, q_len=1)
    kernels = gqa.with_all_heads(gqa_sm90(kv_dtype=DType.E4M3, head_dim=64))

    assert [spec.kv_heads_per_cta for spec in kernels] == [1, 2, 4]
    assert [spec.kv_heads_per_cta for spec in kernels if spec.serves(call)] == serving


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "rows", "heads"),
    [
        *((DType.BF16, 64, 8, 2), (DType.BF16, 128, 8, 1), (DType.BF16, 256, 8, 1)),
        *((DType.E4M3, 64, 8, 4), (DType.E4M3, 128, 8, 2), (DType.E4M3, 256, 8, 1)),
        (DType.E4M3, 64, 9, 1),
    ],
)
def test_heads_of_a_cta_are_256_bytes_of_a_token(
    kv_dtype: DType, head_dim: int, rows: int, heads: int
) -> None:
    """Only tiles of eight rows have several heads; tile and ring sizes are those of one head."""
    one = gqa_sm90(kv_dtype=kv_dtype, head_dim=head_dim, rows=rows)
    all_heads = replace(one, kv_heads_per_cta=heads)

    assert one.max_kv_heads_per_cta == heads
    assert all_heads.block_n * heads == one.block_n
    assert all_heads.block_n * all_heads.token_bytes == one.block_n * one.key_row_bytes
    assert all_heads.stages == one.stages


def test_a_sparse_query_token_is_a_sequence() -> None:
    """The rows of a sparse call are its heads."""
    call = CallShape(heads=16, q_len=4)

    assert mla_sm90_fp8kv(rows=16).serves(call)
    assert mla_sm90_fp8kv(rows=64, lookup="paged").serves(call)
    assert mla_sm90(rows=16, lookup="sparse").serves(call)
    assert not mla_sm90(rows=64, lookup="sparse").serves(call)


@mla_families
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_a_cta_occupies_an_sm_and_waits_for_others(family: Family, rows: int) -> None:
    """The MLA kernels are cooperative, unlike others, and have most of an SM's shared memory."""
    spec = family.build(rows=rows)

    assert spec.is_cooperative
    assert spec.uses_semaphores
    assert not mla_sm80().is_cooperative
    assert (spec.head_dim_qk, spec.head_dim_vo) == (576, 512)
    # With FP8: eight PV warps, four QK warps and four producer warps.
    assert family.variant is BF16 or spec.threads == 512
    assert family.variant is E4M3 or spec.shared_bytes == mla_sm90(rows=rows).shared_bytes
    assert SM_90A.shared_bytes // 2 < spec.shared_bytes <= SM_90A.shared_bytes


def test_gqa_ctas_use_semaphores_but_do_not_wait() -> None:
    """The kernel supports PDL and still needs semaphores."""
    assert gqa_sm90().uses_semaphores
    assert not gqa_sm90().is_cooperative
    assert gqa_sm90().is_persistent


def test_parameters_are_shared() -> None:
    """The FP8 kernel has those of the 16-bit kernel; over lists that has some of the FP8-KV one."""
    assert mla_sm90_fp8().parameters == mla_sm90().parameters
    lists = mla_sm90(lookup="sparse").parameters
    assert set(lists) < set(mla_sm90_fp8kv().parameters)
    assert not {"latent_map", "separate_rope"} & {parameter.name for parameter in lists}
