"""The sm80 launch plans: properties for any shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.families.common.plan_sm80 import Sm80Plan, plan_sm80, plan_sm80_call
from mlagen.families.common.problem import ProblemShape
from mlagen.families.gqa import plan as gqa_select
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.variant import GqaVariant
from mlagen.spec.mla.variant import MlaVariant
from tests.families.shapes import SMS, gqa_shape, mla_shape
from tests.kernels import SM_COUNTS, gqa_sm80, mla_sm80, mla_sm90_two_pools


def plan(shape: ProblemShape, sm_count: int = SMS) -> Sm80Plan:
    """Return the plan of a bf16 problem of DeepSeek-V3's dimensions."""
    return plan_sm80(mla_sm80(rows=shape.heads * shape.q_len), shape, sm_count)


def tiles_of_split(split: int, tiles: int, splits: int) -> range:
    """Return the tiles of a split, computed as in kernels/mla_sm80/work_tile.cuh."""
    per_split = -(-tiles // splits)
    first = min(tiles, split * per_split)
    return range(first, min(tiles, first + per_split))


problems = st.builds(
    mla_shape,
    batch=st.integers(0, 600),
    max_kv_len=st.integers(0, 200_000),
    heads=st.integers(1, 256),
    q_len=st.integers(1, 8),
)


@settings(deadline=None, max_examples=200)
@given(problems, st.sampled_from(SM_COUNTS), st.integers(0, 200_000))
def test_splits_cover_every_tile_once(shape: ProblemShape, sm_count: int, fewer: int) -> None:
    """Splits cover the tiles of any sequence once, and none of the longest sequence is empty."""
    block_n = mla_sm80(rows=shape.heads * shape.q_len).tile.block_n
    planned = plan(shape, sm_count)

    for tiles in (
        max(1, -(-shape.max_kv_len // block_n)),
        -(-max(0, shape.max_kv_len - fewer) // block_n),
    ):
        shares = [
            tiles_of_split(split, tiles, planned.num_splits) for split in range(planned.num_splits)
        ]
        assert [tile for share in shares for tile in share] == list(range(tiles))
    longest = max(1, -(-shape.max_kv_len // block_n))
    assert tiles_of_split(planned.num_splits - 1, longest, planned.num_splits)


@settings(deadline=None, max_examples=200)
@given(problems, st.sampled_from(SM_COUNTS))
def test_the_grid_covers_all_rows_and_bounds_the_workspace(
    shape: ProblemShape, sm_count: int
) -> None:
    """A CTA has an M tile and a split, up to four waves; splits store fp32 rows and LSEs."""
    tile = mla_sm80(rows=shape.heads * shape.q_len).tile
    planned = plan(shape, sm_count)

    rows, most = shape.heads * shape.q_len, planned.m_tiles * tile.block_m
    assert most - tile.block_m < rows <= most
    assert planned.num_ctas == shape.batch * planned.m_tiles * planned.num_splits
    max_ctas = 4 * sm_count * tile.ctas_per_sm
    assert planned.num_splits == 1 or planned.num_ctas <= max_ctas
    partial_rows = (planned.num_splits > 1) * planned.num_splits * shape.total_rows
    assert planned.partial_rows_offset == partial_rows * 512 * 4
    assert planned.workspace_bytes == partial_rows * (512 + 1) * 4
    assert planned.workspace_bytes <= max_ctas * tile.block_m * (512 + 1) * 4


@pytest.mark.parametrize(
    "shape",
    [
        mla_shape(264, 16, 4096),
        mla_shape(132, 128, 131072, q_len=2),
        mla_shape(1, 16, 32),
        mla_shape(1, 16, 0),
        mla_shape(0, 16, 4096),
    ],
    ids=["a full grid", "a full grid of wide tiles", "one tile", "no tokens", "no sequences"],
)
def test_when_kv_is_not_split(shape: ProblemShape) -> None:
    """Work that fills the device, or has one tile, is not split."""
    planned = plan(shape)

    assert (planned.num_splits, planned.workspace_bytes) == (1, 0)


@pytest.mark.parametrize("sm_count", SM_COUNTS)
@pytest.mark.parametrize("heads", [8, 16, 128])
def test_one_long_sequence_fills_the_device(heads: int, sm_count: int) -> None:
    """A single sequence occupies at least half of the SMs."""
    planned = plan(mla_shape(1, heads, 131072), sm_count)

    assert planned.num_ctas >= sm_count / 2


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=50), st.integers(1, 256))
def test_ragged_sequences_have_a_tile_for_each_row(q_lens: list[int], heads: int) -> None:
    """The tiles of a sequence, computed as in common/ragged_tiles.cuh, hold all its rows."""
    shape = mla_shape(len(q_lens), heads, 100, tokens=sum(q_lens))
    rows = mla_sm80(rows=64).tile.block_m
    first = [sum(q_lens[:seq]) * heads // rows + seq for seq in range(len(q_lens) + 1)]

    planned = plan_sm80(mla_sm80(rows=64), shape, SMS)

    assert planned.m_tiles == first[-1]
    assert planned.num_ctas == first[-1] * planned.num_splits
    for seq, q_len in enumerate(q_lens):
        assert (first[seq + 1] - first[seq]) * rows >= q_len * heads


@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.parametrize(("kv_heads", "group"), [(8, 8), (8, 1), (1, 32)])
@pytest.mark.parametrize("tokens", [None, 7])
def test_the_gqa_grid_covers_rows_kv_heads_and_slices(
    kv_heads: int, group: int, head_dim: int, tokens: int | None
) -> None:
    """The grid has one CTA per sequence, M tile, KV head, slice and split."""
    spec = gqa_sm80(rows=group * 3, head_dim=head_dim)
    shape = gqa_shape(5, 9000, kv_heads, group, 3, tokens)

    planned = plan_sm80(spec, shape, SMS)

    of_batch = 5 * -(-group * 3 // spec.tile.block_m)
    tiles = of_batch if tokens is None else 5 + tokens * group // spec.tile.block_m
    assert planned.m_tiles == (tiles if tokens else of_batch // 5)
    assert planned.num_ctas == tiles * kv_heads * spec.slices * planned.num_splits
    rows = (tokens or 15) * kv_heads * group
    partial_rows = (planned.num_splits > 1) * planned.num_splits * rows
    assert planned.partial_rows_offset == partial_rows * head_dim * 4
    assert planned.workspace_bytes == partial_rows * (head_dim + 1) * 4


@pytest.mark.usefixtures("h200")
def test_a_gqa_call_is_planned_for_its_rows_and_window() -> None:
    """Its tile holds the rows of a KV head; a window of 64 tokens has the splits of 64 tokens."""
    variant = GqaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16, out_dtype=DType.BF16)

    def plan_of(max_kv_len: int, window: int = 0, q_len: int = 1) -> tuple[Any, Sm80Plan]:
        attended = gqa_select.attended_tokens(max_kv_len, window, q_len)
        return plan_sm80_call(0, variant, gqa_shape(4, attended, 2, 4, q_len))

    assert [plan_of(1000, q_len=q_len)[0].tile.block_m for q_len in (4, 5)] == [16, 32]
    assert plan_of(100_000, window=64) == plan_of(65)
    assert plan_of(10, window=64) == plan_of(10)
    assert plan_of(100_000)[1].num_splits > plan_of(65)[1].num_splits


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("batch", "heads", "max_kv_len", "rows"),
    [(6, 16, 640, 16), (7, 16, 640, 16), (3, 32, 640, 16), (3, 32, 641, 32), (8, 128, 64, 32)],
)
def test_a_small_call_over_two_pools_has_more_tiles(
    batch: int, heads: int, max_kv_len: int, rows: int
) -> None:
    """Of 16 rows, up to 60 KV blocks in all; never a batch-invariant one, or of one pool."""
    shape = mla_shape(batch, heads, max_kv_len)
    pools = mla_sm90_two_pools(rows=16).variant
    one_pool = mla_sm80(rows=heads).variant

    def rows_of(variant: MlaVariant) -> int:
        spec, _ = plan_sm80_call(0, variant, shape)
        return spec.tile.block_m

    assert rows_of(pools) == rows
    assert rows_of(replace(pools, batch_invariant=True)) == min(heads, 32)
    assert rows_of(one_pool) == min(heads, 64)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("batch", [1, 300])
@pytest.mark.parametrize(
    ("max_kv_len", "is_windowed", "splits"),
    [(0, False, 1), (1024, False, 1), (1025, False, 2), (1024, True, 2), (9000, False, 9)],
)
def test_fixed_splits_follow_the_length_alone(
    rows: int, batch: int, max_kv_len: int, is_windowed: bool, splits: int
) -> None:
    """One for each 1024 tokens, up to the most; the splits of each row are behind the partials."""
    spec = mla_sm80(rows=rows, batch_invariant=True)
    shape = mla_shape(batch, rows, max_kv_len)
    shape = replace(shape, is_windowed=is_windowed)
    for sm_count in SM_COUNTS:
        planned = plan_sm80(spec, shape, sm_count)
        assert planned.num_splits == splits
        partials = splits * shape.total_rows * (512 + 1) * 4
        assert planned.row_splits_offset == (partials if splits > 1 else 0)
        assert planned.workspace_bytes == (partials + shape.total_rows * 4) * (splits > 1)
    longest = plan_sm80(spec, replace(shape, max_kv_len=1 << 24), SMS)
    assert longest.num_splits == spec.max_splits
