"""Which grouped-query calls the sm90 kernel covers, and by which tile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlagen.spec.arch import ARCHS
from mlagen.spec.dtype import DType
from mlagen.spec.gqa import HEAD_DIMS, GqaVariant
from mlagen.spec.gqa_sm90 import (
    block_m_for,
    gqa_sm90_spec,
    gqa_sm90_specs,
    with_all_heads,
)
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
def test_a_call_takes_the_narrowest_tile_that_holds_its_rows(
    head_dim: int, rows: int, block_m: int
) -> None:
    """Or the widest whose output registers can hold, where none does."""
    spec = gqa_sm90(head_dim=head_dim, rows=rows)

    assert block_m_for(head_dim, rows) == spec.block_m == block_m


NOT_COVERED: dict[str, dict[str, Any]] = {
    "int8": {"kv_dtype": DType.INT8},
    "nvfp4": {"kv_dtype": DType.NVFP4},
    "head dim 192": {"head_dim": 192},
    "head dim 512": {"head_dim": 512},
    "pages of 8": {"page_size": 8},
    "pages of 24": {"page_size": 24},
}


@pytest.mark.parametrize("changes", NOT_COVERED.values(), ids=NOT_COVERED)
def test_other_calls_have_no_such_kernel(changes: dict[str, Any]) -> None:
    """There is none to be had for them."""
    assert gqa_sm90_spec(SM_90A, replace(BF16, **changes), 8) is None


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_dtype", [DType.BF16, DType.E4M3])
def test_boxes_lie_in_a_page_and_fill_a_tile(
    kv_dtype: DType, head_dim: int, page_size: int
) -> None:
    """A lane of one warp copies each, and a tile is worth a barrier."""
    spec = gqa_sm90(kv_dtype=kv_dtype, head_dim=head_dim, page_size=page_size)

    assert page_size % spec.box_tokens == 0
    assert spec.block_n % spec.box_tokens == 0
    assert 16 <= spec.box_tokens <= 256  # what a tensor map allows
    assert spec.block_n // spec.box_tokens <= 32
    assert spec.row_bytes % spec.line_bytes == 0
    ring_bytes = {64: 64, 128: 96, 256: 128, 512: 192}[spec.row_bytes] * 1024
    assert spec.stages * spec.block_n * spec.row_bytes == ring_bytes
    assert spec.stages >= 3


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "rows", "merged"),
    [
        (DType.BF16, 64, 32, (32, 64)),
        (DType.BF16, 128, 8, (8, 128)),
        (DType.BF16, 128, 16, (16, 128)),
        (DType.BF16, 128, 32, (16, 128)),
        (DType.BF16, 256, 8, (8, 128)),
        (DType.BF16, 256, 16, (8, 64)),
        (DType.E4M3, 64, 32, (32, 64)),
        (DType.E4M3, 128, 32, (32, 128)),
        (DType.E4M3, 256, 8, (8, 256)),
        (DType.E4M3, 256, 16, (8, 256)),
    ],
)
def test_as_much_is_merged_at_a_time_as_there_is_room_for(
    kv_dtype: DType, head_dim: int, rows: int, merged: tuple[int, int]
) -> None:
    """Whole tiles of rows where the ring leaves room for what eight warps have of them."""
    spec = gqa_sm90(kv_dtype=kv_dtype, head_dim=head_dim, rows=rows)

    assert (spec.combine_rows, spec.combine_dims) == merged
    ring_bytes = spec.stages * spec.block_n * spec.row_bytes
    query_bytes = 0 if spec.keeps_query else rows * head_dim * 2
    merged_bytes = 8 * merged[0] * (merged[1] + 6) * 4
    assert ring_bytes + query_bytes + merged_bytes < spec.shared_bytes


def test_the_widest_tiles_of_e4m3_have_a_smaller_ring() -> None:
    """So that they are merged whole."""
    spec = gqa_sm90(kv_dtype=DType.E4M3, rows=32)

    assert spec.stages * spec.block_n * spec.row_bytes == 80 * 1024


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "rows", "tokens"),
    [
        (DType.BF16, 64, 8, 128),
        (DType.E4M3, 64, 16, 256),
        (DType.E4M3, 128, 8, 256),
        (DType.E4M3, 128, 9, 128),
        (DType.E4M3, 256, 8, 128),
    ],
)
def test_of_what_becomes_another_type_a_warp_has_two_steps_where_registers_allow(
    kv_dtype: DType, head_dim: int, rows: int, tokens: int
) -> None:
    """Beside eight warps of consumers there are a loader, a finder and two mergers."""
    spec = gqa_sm90(kv_dtype=kv_dtype, head_dim=head_dim, rows=rows)

    assert spec.block_n == tokens
    assert spec.consumer_warps == 8
    assert spec.threads == 384


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_only_hopper_has_them(arch: Any) -> None:
    """On it all that SUPPORTED names and the kernel covers, each once."""
    specs = list(gqa_sm90_specs(arch))

    # Query and cache alike, or e4m3 with either output; four pages; tiles of three head dims, the
    # least of them for one head, two or four.
    expected = 2 * 4 * ((4 + 3 + 2) + 2 * (5 + 4 + 2))
    assert len(set(specs)) == len(specs) == (expected if arch == SM_90A else 0)


@pytest.mark.parametrize("heads", [8, 24, 64])
def test_a_kernel_serves_the_calls_of_its_tile(heads: int) -> None:
    """Prewarming for heads and query tokens keeps what the call would take."""
    call = CallShape(heads=heads, kv_heads=4, q_len=2)

    serving = [rows for rows in (8, 16, 32) if gqa_sm90(rows=rows).serves(call)]

    assert serving == [gqa_sm90(rows=heads // 4 * 2).block_m]
    assert gqa_sm90().serves(CallShape(heads=heads))


@pytest.mark.parametrize(
    ("kv_heads", "serving"), [(8, [1, 4]), (6, [1, 2]), (3, [1]), (None, [1, 2, 4])]
)
def test_a_call_takes_one_head_in_a_block_or_all_that_divide_its_heads(
    kv_heads: int | None, serving: list[int]
) -> None:
    """Which of the two, the number of requests decides."""
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
def test_heads_of_a_block_are_256_bytes_of_a_token_together(
    kv_dtype: DType, head_dim: int, rows: int, heads: int
) -> None:
    """Where their rows are eight at the most; tiles and rings have as many bytes as of one."""
    one = gqa_sm90(kv_dtype=kv_dtype, head_dim=head_dim, rows=rows)
    all_heads = replace(one, heads_per_cta=heads)

    assert one.max_heads == heads
    assert all_heads.block_n * heads == one.block_n
    assert all_heads.block_n * all_heads.token_bytes == one.block_n * one.row_bytes
    assert all_heads.stages == one.stages


def test_its_blocks_count_each_other_but_do_not_wait() -> None:
    """So it may be a dependent launch, and needs counters all the same."""
    assert gqa_sm90().uses_semaphores
    assert not gqa_sm90().is_cooperative
