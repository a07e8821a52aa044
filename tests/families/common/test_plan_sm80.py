"""Tests of the sm80 launch plans."""

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
from mlagen.spec.mla.sm80 import MlaSm80Spec
from tests.kernels import SM_80, gqa_sm80, mla_sm80

H200_SMS = 132


def problem(
    *, batch: int, max_kv_len: int, heads: int = 16, q_len: int = 1, tokens: int | None = None
) -> MlaProblemShape:
    """Return a problem; ``tokens`` are the query tokens of ragged sequences."""
    return MlaProblemShape(
        batch=batch,
        q_len=q_len,
        heads=heads,
        total_rows=(batch * q_len if tokens is None else tokens) * heads,
        max_kv_len=max_kv_len,
    )


def plan(shape: MlaProblemShape, *, arch: str = "sm_90a", sm_count: int = H200_SMS) -> Sm80Plan:
    """Return the plan of a bf16 problem of DeepSeek-V3's dimensions."""
    spec = spec_of(shape, arch)
    return plan_mla_sm80(spec, shape, sm_count)


def spec_of(shape: MlaProblemShape, arch: str) -> MlaSm80Spec:
    """Return the kernel of a problem."""
    rows = shape.heads * shape.q_len
    return mla_sm80(arch=SM_80, rows=rows) if arch == "sm_80" else mla_sm80(rows=rows)


def tiles_of_split(split: int, tiles: int, splits: int) -> range:
    """Return the tiles of a split, computed as in kernels/mla_sm80/work_item.cuh."""
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
@given(shape=problems, sm_count=st.sampled_from([1, 46, 108, 132, 148]))
def test_splits_cover_every_tile_once(shape: MlaProblemShape, sm_count: int) -> None:
    """No split of the longest sequence is empty, and together they cover each tile once."""
    spec = spec_of(shape, "sm_90a")
    tiles = max(1, -(-shape.max_kv_len // spec.tile.block_n))

    planned = plan(shape, sm_count=sm_count)

    shares = [tiles_of_split(split, tiles, planned.splits) for split in range(planned.splits)]
    assert 1 <= planned.splits <= tiles
    assert all(shares)
    assert [tile for share in shares for tile in share] == list(range(tiles))


@settings(deadline=None, max_examples=200)
@given(shape=problems, fewer=st.integers(0, 200_000))
def test_shorter_sequences_are_covered(shape: MlaProblemShape, fewer: int) -> None:
    """The splits cover each tile of any shorter sequence once."""
    spec = spec_of(shape, "sm_90a")
    tiles = -(-max(0, shape.max_kv_len - fewer) // spec.tile.block_n)

    planned = plan(shape)

    shares = [tiles_of_split(split, tiles, planned.splits) for split in range(planned.splits)]
    assert [tile for share in shares for tile in share] == list(range(tiles))


@settings(deadline=None, max_examples=200)
@given(shape=problems)
def test_the_grid_covers_all_rows(shape: MlaProblemShape) -> None:
    """The grid has one CTA per sequence, row tile and split."""
    spec = spec_of(shape, "sm_90a")

    planned = plan(shape)

    rows = shape.heads * shape.q_len
    assert (
        (planned.row_tiles - 1) * spec.tile.block_m < rows <= planned.row_tiles * spec.tile.block_m
    )
    assert planned.num_ctas == shape.batch * planned.row_tiles * planned.splits


@settings(deadline=None, max_examples=200)
@given(shape=problems)
def test_the_workspace_holds_exactly_the_partials(shape: MlaProblemShape) -> None:
    """A split call stores an fp32 row and its LSE per row and split; others store nothing."""
    planned = plan(shape)

    partial_rows = planned.splits * shape.total_rows if planned.splits > 1 else 0
    assert planned.partial_rows == partial_rows
    assert planned.workspace_bytes == partial_rows * (512 + 1) * 4


@settings(deadline=None, max_examples=200)
@given(shape=problems)
def test_the_workspace_is_bounded_by_the_device(shape: MlaProblemShape) -> None:
    """Splits are bounded by a few CTAs per slot of the device, which bounds the workspace."""
    planned = plan(shape)

    spec = spec_of(shape, "sm_90a")
    max_blocks = 4 * H200_SMS * spec.tile.ctas_per_sm
    assert planned.splits == 1 or planned.num_ctas <= max_blocks
    assert planned.workspace_bytes <= max_blocks * spec.tile.block_m * (512 + 1) * 4


@pytest.mark.parametrize(
    "shape",
    [
        problem(batch=264, max_kv_len=4096),
        problem(batch=132, max_kv_len=131072, heads=128, q_len=2),
        problem(batch=1, max_kv_len=32),
        problem(batch=1, max_kv_len=0),
        problem(batch=0, max_kv_len=4096),
    ],
    ids=["a full grid", "a full grid of wide tiles", "one tile", "no tokens", "no sequences"],
)
def test_when_kv_is_not_split(shape: MlaProblemShape) -> None:
    """Work that fills the device, or has one tile, is not split."""
    planned = plan(shape)

    assert planned.splits == 1
    assert planned.workspace_bytes == 0


@pytest.mark.parametrize("heads", [8, 16, 128])
def test_one_long_sequence_fills_the_device(heads: int) -> None:
    """A single sequence occupies at least half of the SMs."""
    planned = plan(problem(batch=1, max_kv_len=131072, heads=heads))

    assert planned.splits > 1
    assert planned.num_ctas >= H200_SMS // 2


def test_a_plan_depends_on_shapes_only() -> None:
    """Equal problems have equal plans, so a captured call can be replayed."""
    first, second = (plan(problem(batch=4, max_kv_len=5000)) for _ in range(2))

    assert first == second


@settings(deadline=None, max_examples=200)
@given(
    q_lens=st.lists(st.integers(0, 40), min_size=1, max_size=50),
    heads=st.integers(1, 256),
)
def test_ragged_sequences_have_a_tile_for_each_row(q_lens: list[int], heads: int) -> None:
    """The tiles of a sequence, computed as in common/ragged_tiles.cuh, hold all its rows."""
    shape = problem(batch=len(q_lens), max_kv_len=100, heads=heads, q_len=0, tokens=sum(q_lens))
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
        batch=5, q_len=3, heads=heads, kv_heads=kv_heads, total_rows=15 * heads, max_kv_len=9000
    )

    planned = plan_gqa_sm80(spec, shape, H200_SMS)

    assert planned.row_tiles == -(-heads // kv_heads * 3 // spec.tile.block_m)
    assert planned.num_ctas == 5 * planned.row_tiles * kv_heads * spec.slices * planned.splits
    partial_rows = planned.splits * 15 * heads if planned.splits > 1 else 0
    assert planned.workspace_bytes == partial_rows * (head_dim + 1) * 4
