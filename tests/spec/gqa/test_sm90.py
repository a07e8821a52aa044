"""Tests of the sm90 GQA specs: covered calls and tile selection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlagen.spec.arch import ARCHS
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.sm90 import (
    block_m_for,
    gqa_sm90_spec,
    gqa_sm90_specs,
    with_all_heads,
)
from mlagen.spec.gqa.variant import HEAD_DIMS, GqaVariant
from mlagen.spec.kernel import CallShape
from tests.kernels import SM_90A, gqa_sm90

BF16 = GqaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16, out_dtype=DType.BF16)


@pytest.mark.parametrize(
    ("head_dim", "rows", "block_m"),
    [
        *((dim, rows, 8) for dim in HEAD_DIMS for rows in (1, 8)),
        *((dim, rows, 16) for dim in HEAD_DIMS for rows in (9, 16)),
        (64, 17, 32),
        (128, 32, 32),
        (128, 33, 32),
        (256, 17, 16),
    ],
)
def test_a_call_uses_the_smallest_tile_that_holds_its_rows(
    head_dim: int, rows: int, block_m: int
) -> None:
    """If none holds them, the call uses the largest tile whose accumulators fit the registers."""
    spec = gqa_sm90(head_dim=head_dim, rows=rows)

    assert block_m_for(head_dim, rows) == spec.block_m == block_m


@pytest.mark.parametrize(
    "changes",
    [
        *({"kv_dtype": DType.INT8}, {"kv_dtype": DType.NVFP4}),
        *({"head_dim": 192}, {"head_dim": 512}, {"page_size": 8}, {"page_size": 24}),
    ],
    ids=str,
)
def test_an_unsupported_call_has_no_sm90_kernel(changes: dict[str, Any]) -> None:
    """The spec of an unsupported call is None."""
    assert gqa_sm90_spec(SM_90A, replace(BF16, **changes), 8) is None


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_dtype", [DType.BF16, DType.E4M3])
def test_tma_boxes_lie_in_a_page_and_fill_a_tile(
    kv_dtype: DType, head_dim: int, page_size: int
) -> None:
    """One lane of a warp issues each box, and a tile is large enough for a barrier."""
    spec = gqa_sm90(kv_dtype=kv_dtype, head_dim=head_dim, page_size=page_size)

    assert page_size % spec.box_tokens == 0
    assert spec.block_n % spec.box_tokens == 0
    assert 16 <= spec.box_tokens <= 256  # the limits of a tensor map
    assert spec.block_n // spec.box_tokens <= 32
    assert spec.row_bytes % spec.line_bytes == 0
    ring_bytes = {64: 64, 128: 96, 256: 128, 512: 192}[spec.row_bytes] * 1024
    assert spec.stages * spec.block_n * spec.row_bytes == ring_bytes
    assert spec.stages >= 3


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "rows", "block_n", "combined"),
    [
        (DType.BF16, 64, 8, 128, (8, 64)),
        (DType.BF16, 64, 32, 128, (32, 64)),
        (DType.BF16, 128, 8, 128, (8, 128)),
        (DType.BF16, 128, 16, 128, (16, 128)),
        (DType.BF16, 128, 32, 128, (16, 128)),
        (DType.BF16, 256, 8, 128, (8, 128)),
        (DType.BF16, 256, 16, 128, (8, 64)),
        # A converted cache has two steps in flight where registers allow.
        (DType.E4M3, 64, 16, 256, (16, 64)),
        (DType.E4M3, 64, 32, 128, (32, 64)),
        (DType.E4M3, 128, 8, 256, (8, 128)),
        (DType.E4M3, 128, 16, 128, (16, 128)),
        (DType.E4M3, 128, 32, 128, (32, 128)),
        (DType.E4M3, 256, 8, 128, (8, 256)),
        (DType.E4M3, 256, 16, 128, (8, 256)),
    ],
)
def test_the_tiles_fill_the_shared_memory(
    kv_dtype: DType, head_dim: int, rows: int, block_n: int, combined: tuple[int, int]
) -> None:
    """The epilogue combines whole rows of eight warps where the ring leaves capacity for them."""
    spec = gqa_sm90(kv_dtype=kv_dtype, head_dim=head_dim, rows=rows)

    assert (spec.block_n, spec.combine_rows, spec.combine_dims) == (block_n, *combined)
    ring_bytes = spec.stages * spec.block_n * spec.row_bytes
    query_bytes = 0 if spec.keeps_query else rows * head_dim * 2
    combined_bytes = 8 * combined[0] * (combined[1] + 6) * 4
    assert ring_bytes + query_bytes + combined_bytes < spec.shared_bytes
    # A producer warp, a scheduler warp and two epilogue warps besides.
    assert (spec.consumer_warps, spec.threads) == (8, 384)


def test_the_largest_e4m3_tile_has_a_smaller_ring() -> None:
    """The smaller ring lets the tile combine in one pass."""
    spec = gqa_sm90(kv_dtype=DType.E4M3, rows=32)

    assert spec.stages * spec.block_n * spec.row_bytes == 80 * 1024


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_only_sm_90a_has_sm90_kernels(arch: Any) -> None:
    """Every supported variant that the kernel covers is listed once."""
    specs = list(gqa_sm90_specs(arch))

    # Query and cache of one dtype, or e4m3 with either output; four page sizes; tiles of three head
    # dims, the smallest of them for one, two or four heads per CTA.
    expected = 2 * 4 * ((4 + 3 + 2) + 2 * (5 + 4 + 2))
    assert len(set(specs)) == len(specs) == (expected if arch == SM_90A else 0)


@pytest.mark.parametrize("heads", [8, 24, 64])
def test_a_kernel_matches_the_calls_of_its_tile(heads: int) -> None:
    """Prewarming for heads and query tokens selects the kernel that the call uses."""
    call = CallShape(heads=heads, kv_heads=4, q_len=2)

    serving = [rows for rows in (8, 16, 32) if gqa_sm90(rows=rows).serves(call)]

    assert serving == [gqa_sm90(rows=heads // 4 * 2).block_m]
    assert gqa_sm90().serves(CallShape(heads=heads))


@pytest.mark.parametrize(
    ("kv_heads", "serving"), [(8, [1, 4]), (6, [1, 2]), (3, [1]), (None, [1, 2, 4])]
)
def test_a_cta_processes_one_head_or_the_max_that_divides_the_heads(
    kv_heads: int | None, serving: list[int]
) -> None:
    """The number of sequences decides between the two."""
    call = CallShape(heads=24, kv_heads=kv_heads, q_len=1)
    kernels = with_all_heads(gqa_sm90(kv_dtype=DType.E4M3, head_dim=64))

    assert [spec.heads_per_cta for spec in kernels] == [1, 2, 4]
    assert [spec.heads_per_cta for spec in kernels if spec.serves(call)] == serving


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "rows", "heads"),
    [
        (DType.BF16, 64, 8, 2),
        (DType.BF16, 128, 8, 1),
        (DType.BF16, 256, 8, 1),
        (DType.E4M3, 64, 8, 4),
        (DType.E4M3, 128, 8, 2),
        (DType.E4M3, 256, 8, 1),
        (DType.E4M3, 64, 9, 1),
    ],
)
def test_heads_of_a_cta_are_256_bytes_of_a_token(
    kv_dtype: DType, head_dim: int, rows: int, heads: int
) -> None:
    """Only tiles of eight rows have several heads; tile and ring sizes are those of one head."""
    one = gqa_sm90(kv_dtype=kv_dtype, head_dim=head_dim, rows=rows)
    all_heads = replace(one, heads_per_cta=heads)

    assert one.max_heads == heads
    assert all_heads.block_n * heads == one.block_n
    assert all_heads.block_n * all_heads.token_bytes == one.block_n * one.row_bytes
    assert all_heads.stages == one.stages


def test_ctas_use_semaphores_but_do_not_wait() -> None:
    """The kernel supports PDL and still needs semaphores."""
    assert gqa_sm90().uses_semaphores
    assert not gqa_sm90().is_cooperative
    assert gqa_sm90().is_persistent
