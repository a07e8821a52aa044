"""How a problem is spread over a device, from shapes alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.runtime.plan import (
    GqaProblemShape,
    MlaProblemShape,
    Sm80Plan,
    plan_gqa_sm80,
    plan_mla_sm80,
)
from mlagen.spec.mla import MlaSm80Spec
from tests.kernels import SM_80, gqa_sm80, mla_sm80

H200_SMS = 132


def problem(
    *, batch: int, max_kv_len: int, heads: int = 16, q_len: int = 1, tokens: int | None = None
) -> MlaProblemShape:
    """Return a problem; ``tokens`` are the query tokens of ragged requests."""
    return MlaProblemShape(
        batch=batch,
        q_len=q_len,
        heads=heads,
        total_rows=(batch * q_len if tokens is None else tokens) * heads,
        max_kv_len=max_kv_len,
    )


def plan(asked: MlaProblemShape, *, arch: str = "sm_90a", sm_count: int = H200_SMS) -> Sm80Plan:
    """Return the plan of a bf16 problem of DeepSeek-V3's dimensions."""
    spec = spec_of(asked, arch)
    return plan_mla_sm80(spec, asked, sm_count)


def spec_of(asked: MlaProblemShape, arch: str) -> MlaSm80Spec:
    """Return the kernel that serves a problem."""
    rows = asked.heads * asked.q_len
    return mla_sm80(arch=SM_80, rows=rows) if arch == "sm_80" else mla_sm80(rows=rows)


def tiles_of_split(split: int, tiles: int, splits: int) -> range:
    """Return the tiles of a split, as kernels/mla_sm80/work_tile.cuh divides them."""
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
@given(asked=problems, sm_count=st.sampled_from([1, 46, 108, 132, 148]))
def test_every_tile_is_attended_to_once(asked: MlaProblemShape, sm_count: int) -> None:
    """No split is without a tile of the longest request, and together they cover each once."""
    spec = spec_of(asked, "sm_90a")
    tiles = max(1, -(-asked.max_kv_len // spec.tile.block_n))

    planned = plan(asked, sm_count=sm_count)

    shares = [tiles_of_split(split, tiles, planned.splits) for split in range(planned.splits)]
    assert 1 <= planned.splits <= tiles
    assert all(shares)
    assert [tile for share in shares for tile in share] == list(range(tiles))


@settings(deadline=None, max_examples=200)
@given(asked=problems, fewer=st.integers(0, 200_000))
def test_shorter_requests_are_covered_too(asked: MlaProblemShape, fewer: int) -> None:
    """However short a request of the batch is, its tiles are attended to once each."""
    spec = spec_of(asked, "sm_90a")
    tiles = -(-max(0, asked.max_kv_len - fewer) // spec.tile.block_n)

    planned = plan(asked)

    shares = [tiles_of_split(split, tiles, planned.splits) for split in range(planned.splits)]
    assert [tile for share in shares for tile in share] == list(range(tiles))


@settings(deadline=None, max_examples=200)
@given(asked=problems)
def test_blocks_cover_all_rows(asked: MlaProblemShape) -> None:
    """There is a block for each row tile of each request and split, and no more."""
    spec = spec_of(asked, "sm_90a")

    planned = plan(asked)

    rows = asked.heads * asked.q_len
    assert (
        (planned.row_tiles - 1) * spec.tile.block_m < rows <= planned.row_tiles * spec.tile.block_m
    )
    assert planned.blocks == asked.batch * planned.row_tiles * planned.splits


@settings(deadline=None, max_examples=200)
@given(asked=problems)
def test_the_workspace_holds_the_partial_rows_and_no_more(asked: MlaProblemShape) -> None:
    """A split call keeps an fp32 row and its LSE for each row and split; a whole call nothing."""
    planned = plan(asked)

    partial_rows = planned.splits * asked.total_rows if planned.splits > 1 else 0
    assert planned.partial_rows == partial_rows
    assert planned.workspace_bytes == partial_rows * (512 + 1) * 4


@settings(deadline=None, max_examples=200)
@given(asked=problems)
def test_the_workspace_is_bounded_by_the_device(asked: MlaProblemShape) -> None:
    """Splits stop at a few blocks for each slot of the device, so the workspace does too."""
    planned = plan(asked)

    spec = spec_of(asked, "sm_90a")
    max_blocks = 4 * H200_SMS * spec.tile.ctas_per_sm
    assert planned.splits == 1 or planned.blocks <= max_blocks
    assert planned.workspace_bytes <= max_blocks * spec.tile.block_m * (512 + 1) * 4


@pytest.mark.parametrize(
    "asked",
    [
        problem(batch=264, max_kv_len=4096),
        problem(batch=132, max_kv_len=131072, heads=128, q_len=2),
        problem(batch=1, max_kv_len=32),
        problem(batch=1, max_kv_len=0),
        problem(batch=0, max_kv_len=4096),
    ],
    ids=["a full grid", "a full grid of wide tiles", "one tile", "no tokens", "no requests"],
)
def test_what_is_not_split(asked: MlaProblemShape) -> None:
    """Work that fills the device, or is one tile long, gains nothing from splitting."""
    planned = plan(asked)

    assert planned.splits == 1
    assert planned.workspace_bytes == 0


@pytest.mark.parametrize("heads", [8, 16, 128])
def test_one_long_request_fills_the_device(heads: int) -> None:
    """A single request is spread over at least half of the SMs."""
    planned = plan(problem(batch=1, max_kv_len=131072, heads=heads))

    assert planned.splits > 1
    assert planned.blocks >= H200_SMS // 2


def test_a_plan_depends_on_shapes_alone() -> None:
    """Two problems that are equal have one plan, so a captured call can be replayed."""
    first, second = (plan(problem(batch=4, max_kv_len=5000)) for _ in range(2))

    assert first == second


@settings(deadline=None, max_examples=200)
@given(
    q_lens=st.lists(st.integers(0, 40), min_size=1, max_size=50),
    heads=st.integers(1, 256),
)
def test_ragged_requests_have_a_tile_for_each_of_their_rows(q_lens: list[int], heads: int) -> None:
    """The tiles of a request, as common/ragged_tiles.cuh finds them, hold all its rows."""
    asked = problem(batch=len(q_lens), max_kv_len=100, heads=heads, q_len=0, tokens=sum(q_lens))
    rows = mla_sm80(rows=64).tile.block_m
    first = [sum(q_lens[:request]) * heads // rows + request for request in range(len(q_lens) + 1)]

    planned = plan_mla_sm80(mla_sm80(rows=64), asked, H200_SMS)

    assert planned.row_tiles == first[-1]
    assert planned.blocks == first[-1] * planned.splits
    for request, q_len in enumerate(q_lens):
        assert (first[request + 1] - first[request]) * rows >= q_len * heads


@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 8), (8, 8), (32, 1)])
def test_gqa_blocks_cover_rows_kv_heads_and_slices(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    """There is a block for each row tile of each request, kv head, slice and split."""
    spec = gqa_sm80(rows=heads // kv_heads * 3, head_dim=head_dim)
    asked = GqaProblemShape(
        batch=5, q_len=3, heads=heads, kv_heads=kv_heads, total_rows=15 * heads, max_kv_len=9000
    )

    planned = plan_gqa_sm80(spec, asked, H200_SMS)

    assert planned.row_tiles == -(-heads // kv_heads * 3 // spec.tile.block_m)
    assert planned.blocks == 5 * planned.row_tiles * kv_heads * spec.slices * planned.splits
    partial_rows = planned.splits * 15 * heads if planned.splits > 1 else 0
    assert planned.workspace_bytes == partial_rows * (head_dim + 1) * 4
