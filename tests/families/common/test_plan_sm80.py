"""The sm80 launch plans: properties for any shape."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.families.common.plan_sm80 import (
    GqaProblemShape,
    MlaProblemShape,
    Sm80Plan,
    plan_gqa_sm80,
    plan_mla_sm80,
)
from tests.kernels import SM_COUNTS, gqa_sm80, mla_sm80

H200_SMS = 132


def problem(batch: int, max_kv_len: int, heads: int = 16, q_len: int = 1) -> MlaProblemShape:
    """Return a problem of equal query lengths."""
    return MlaProblemShape(
        batch=batch,
        q_len=q_len,
        heads=heads,
        total_rows=batch * q_len * heads,
        max_kv_len=max_kv_len,
    )


def plan(shape: MlaProblemShape, sm_count: int = H200_SMS) -> Sm80Plan:
    """Return the plan of a bf16 problem of DeepSeek-V3's dimensions."""
    return plan_mla_sm80(mla_sm80(rows=shape.heads * shape.q_len), shape, sm_count)


def tiles_of_split(split: int, tiles: int, splits: int) -> range:
    """Return the tiles of a split, computed as in kernels/mla_sm80/work_tile.cuh."""
    per_split = -(-tiles // splits)
    first = min(tiles, split * per_split)
    return range(first, min(tiles, first + per_split))


problems = st.builds(
    problem,
    batch=st.integers(0, 600),
    max_kv_len=st.integers(0, 200_000),
    heads=st.integers(1, 256),
    q_len=st.integers(1, 8),
)


@settings(deadline=None, max_examples=200)
@given(problems, st.sampled_from(SM_COUNTS), st.integers(0, 200_000))
def test_splits_cover_every_tile_once(shape: MlaProblemShape, sm_count: int, fewer: int) -> None:
    """Splits cover the tiles of any sequence once, and none of the longest sequence is empty."""
    block_n = mla_sm80(rows=shape.heads * shape.q_len).tile.block_n
    planned = plan(shape, sm_count)

    for tiles in (
        max(1, -(-shape.max_kv_len // block_n)),
        -(-max(0, shape.max_kv_len - fewer) // block_n),
    ):
        shares = [tiles_of_split(split, tiles, planned.splits) for split in range(planned.splits)]
        assert [tile for share in shares for tile in share] == list(range(tiles))
    longest = max(1, -(-shape.max_kv_len // block_n))
    assert tiles_of_split(planned.splits - 1, longest, planned.splits)


@settings(deadline=None, max_examples=200)
@given(problems, st.sampled_from(SM_COUNTS))
def test_the_grid_covers_all_rows_and_bounds_the_workspace(
    shape: MlaProblemShape, sm_count: int
) -> None:
    """A CTA has a row tile and a split, up to four waves; splits store fp32 rows and LSEs."""
    tile = mla_sm80(rows=shape.heads * shape.q_len).tile
    planned = plan(shape, sm_count)

    rows, most = shape.heads * shape.q_len, planned.row_tiles * tile.block_m
    assert most - tile.block_m < rows <= most
    assert planned.num_ctas == shape.batch * planned.row_tiles * planned.splits
    max_ctas = 4 * sm_count * tile.ctas_per_sm
    assert planned.splits == 1 or planned.num_ctas <= max_ctas
    assert planned.partial_rows == (planned.splits > 1) * planned.splits * shape.total_rows
    assert planned.workspace_bytes == planned.partial_rows * (512 + 1) * 4
    assert planned.workspace_bytes <= max_ctas * tile.block_m * (512 + 1) * 4


@pytest.mark.parametrize(
    "shape",
    [
        problem(264, 4096),
        problem(132, 131072, heads=128, q_len=2),
        problem(1, 32),
        problem(1, 0),
        problem(0, 4096),
    ],
    ids=["a full grid", "a full grid of wide tiles", "one tile", "no tokens", "no sequences"],
)
def test_when_kv_is_not_split(shape: MlaProblemShape) -> None:
    """Work that fills the device, or has one tile, is not split."""
    planned = plan(shape)

    assert (planned.splits, planned.workspace_bytes) == (1, 0)


@pytest.mark.parametrize("sm_count", SM_COUNTS)
@pytest.mark.parametrize("heads", [8, 16, 128])
def test_one_long_sequence_fills_the_device(heads: int, sm_count: int) -> None:
    """A single sequence occupies at least half of the SMs."""
    planned = plan(problem(1, 131072, heads=heads), sm_count)

    assert planned.num_ctas >= sm_count / 2


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=50), st.integers(1, 256))
def test_ragged_sequences_have_a_tile_for_each_row(q_lens: list[int], heads: int) -> None:
    """The tiles of a sequence, computed as in common/ragged_tiles.cuh, hold all its rows."""
    shape = MlaProblemShape(
        batch=len(q_lens), q_len=0, heads=heads, total_rows=sum(q_lens) * heads, max_kv_len=100
    )
    rows = mla_sm80(rows=64).tile.block_m
    first = [sum(q_lens[:seq]) * heads // rows + seq for seq in range(len(q_lens) + 1)]

    planned = plan_mla_sm80(mla_sm80(rows=64), shape, H200_SMS)

    assert planned.row_tiles == first[-1]
    assert planned.num_ctas == first[-1] * planned.splits
    for seq, q_len in enumerate(q_lens):
        assert (first[seq + 1] - first[seq]) * rows >= q_len * heads


@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 8), (8, 8), (32, 1)])
def test_the_gqa_grid_covers_rows_kv_heads_and_slices(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    """The grid has one CTA per sequence, row tile, KV head, slice and split."""
    spec = gqa_sm80(rows=heads // kv_heads * 3, head_dim=head_dim)
    shape = GqaProblemShape(
        batch=5,
        q_len=3,
        max_q_len=3,
        heads=heads,
        kv_heads=kv_heads,
        total_rows=15 * heads,
        max_kv_len=9000,
    )

    planned = plan_gqa_sm80(spec, shape, H200_SMS)

    assert planned.row_tiles == -(-heads // kv_heads * 3 // spec.tile.block_m)
    assert planned.num_ctas == 5 * planned.row_tiles * kv_heads * spec.slices * planned.splits
    assert planned.partial_rows == (planned.splits > 1) * planned.splits * 15 * heads
    assert planned.workspace_bytes == planned.partial_rows * (head_dim + 1) * 4
