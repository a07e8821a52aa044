"""How a problem is spread over a Hopper GPU, against numbers worked out by hand."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.runtime.plan import MlaProblemShape
from mlagen.runtime.plan_mla_sm90 import MlaSm90Plan, choose_block_m, fits_in_int32, plan_mla_sm90
from mlagen.spec.dtype import DType
from mlagen.spec.mla_sm90 import MlaSm90Spec
from tests.kernels import mla_sm90, mla_sm90_fp8, mla_sm90_fp8kv

SMS = 132


def plan(
    *,
    batch: int,
    heads: int,
    max_kv_len: int,
    q_len: int = 1,
    tokens: int | None = None,
    sm_count: int = SMS,
) -> MlaSm90Plan:
    """Return the plan of a bf16 problem; ``tokens`` are the query tokens of ragged requests."""
    problem = MlaProblemShape(
        batch=batch,
        q_len=q_len if tokens is None else 0,
        heads=heads,
        total_rows=(batch * q_len if tokens is None else tokens) * heads,
        max_kv_len=max_kv_len,
    )
    return plan_mla_sm90(mla_sm90(rows=heads * q_len), problem, q_len, sm_count)


class Worked(NamedTuple):
    """What a problem comes to."""

    problem: dict[str, int]
    cta_group_size: int
    num_cta_groups: int
    block_m: int


WORKED = {
    # One tile: one block each; 2 requests of 16 blocks and 2 positions more are 36, so 18 spans.
    # With a wide tile it is 6 more: 44, so 22.
    "a tile of 16": Worked({"batch": 2, "heads": 16, "max_kv_len": 1024}, 1, 18, 16),
    "a tile of 32": Worked({"batch": 2, "heads": 20, "max_kv_len": 1024}, 1, 18, 32),
    "a tile of 64": Worked({"batch": 2, "heads": 64, "max_kv_len": 1024}, 1, 22, 64),
    # Two tiles: 2 rounds by one, 1 round by 66 teams of two, 44 of three or 33 of four.
    "two tiles": Worked({"batch": 80, "heads": 128, "max_kv_len": 4096}, 2, 66, 64),
    # Three tiles: 3 / 132 and 1 / 44 are as good; the larger is taken.
    "three tiles": Worked({"batch": 80, "heads": 192, "max_kv_len": 4096}, 3, 44, 64),
    # Four tiles: 4 / 132, 2 / 66 and 1 / 33 are as good.
    "four tiles": Worked({"batch": 80, "heads": 128, "q_len": 2, "max_kv_len": 4096}, 4, 33, 64),
    # Five tiles: 5 / 132 is less than 3 / 66, 2 / 44 and 2 / 33.
    "five tiles": Worked({"batch": 80, "heads": 64, "q_len": 5, "max_kv_len": 4096}, 1, 132, 64),
    # Of 131 SMs teams of two leave one idle, teams of three two: 6 / 131 is the least.
    "an odd device": Worked(
        {"batch": 80, "heads": 128, "q_len": 3, "max_kv_len": 4096, "sm_count": 131}, 1, 131, 64
    ),
    # A unit of no tokens is 2 positions: 1 span.
    "no tokens": Worked({"batch": 1, "heads": 16, "max_kv_len": 0}, 1, 1, 16),
    # Two groups of two tiles, of 2 + 6 positions: 8 spans.
    "few tokens": Worked({"batch": 2, "heads": 128, "max_kv_len": 65}, 2, 8, 64),
    # 10 query tokens of 128 heads are 10 groups of 128 rows, and 4 requests may begin 4 more: with
    # 1 + 6 positions each 98, which is 49 spans.
    "ragged": Worked({"batch": 4, "heads": 128, "max_kv_len": 64, "tokens": 10}, 2, 49, 64),
    "two SMs": Worked({"batch": 9, "heads": 256, "max_kv_len": 4096, "sm_count": 2}, 2, 1, 64),
}


@pytest.mark.parametrize("worked", WORKED.values(), ids=WORKED)
def test_teams_and_grid_are_those_worked_out_by_hand(worked: Worked) -> None:
    """A team is the size that takes the fewest rounds; there are as many as spans are worth it."""
    planned = plan(**worked.problem)

    blocks = worked.num_cta_groups * worked.cta_group_size
    values = 2 * blocks * worked.block_m * 512 * 2
    assert planned == MlaSm90Plan(
        cta_group_size=worked.cta_group_size,
        num_cta_groups=worked.num_cta_groups,
        blocks=blocks,
        groups=planned.groups,
        partial_rows_offset=values,
        workspace_bytes=values + 2 * blocks * worked.block_m * 16,
        is_small=planned.is_small,
    )


# Of 132 SMs: blocks of 64 tokens of all tiles, for bf16 two for each SM with tiles of 16 rows, for
# what is stored in eight bits three, and six with tiles of 32.
@pytest.mark.parametrize(
    ("spec", "batch", "heads", "max_kv_len", "block_m"),
    [
        (mla_sm90(rows=128), 1, 128, 64 * 33, 16),
        (mla_sm90(rows=128), 1, 128, 64 * 33 + 1, 64),
        (mla_sm90(rows=128), 33, 128, 64, 16),
        (mla_sm90(rows=128), 34, 128, 64, 64),
        (mla_sm90(rows=17), 1, 17, 64, 16),
        (mla_sm90(rows=16), 1, 16, 1, 16),
        (mla_sm90_fp8(rows=128), 1, 128, 64 * 49, 16),
        (mla_sm90_fp8(rows=128), 1, 128, 64 * 50, 32),
        (mla_sm90_fp8(rows=128), 1, 128, 64 * 198, 32),
        (mla_sm90_fp8(rows=128), 1, 128, 64 * 199, 64),
        (mla_sm90_fp8kv(rows=128), 1, 128, 2048, 16),
        (mla_sm90_fp8kv(rows=128), 4, 128, 2048, 32),
        (mla_sm90_fp8kv(rows=128), 8, 128, 2048, 64),
    ],
    ids=str,
)
def test_little_work_takes_tiles_of_few_rows(
    spec: MlaSm90Spec, batch: int, heads: int, max_kv_len: int, block_m: int
) -> None:
    """So that more SMs have some of it."""
    problem = MlaProblemShape(
        batch=batch, q_len=1, heads=heads, total_rows=batch * heads, max_kv_len=max_kv_len
    )

    assert choose_block_m(spec, problem, 1, SMS) == block_m


@pytest.mark.parametrize(
    ("batch", "heads", "max_kv_len", "is_small"),
    [
        (2, 16, 1024, True),
        (16, 16, 1024, True),
        (16, 16, 1025, False),
        (4, 32, 1024, True),
        (4, 32, 1025, False),
        (1, 33, 64, False),
    ],
)
def test_few_rows_of_few_tokens_are_small(
    batch: int, heads: int, max_kv_len: int, is_small: bool
) -> None:
    """256 blocks of 64 tokens for 16 rows, 64 for up to 32, and none for more."""
    assert plan(batch=batch, heads=heads, max_kv_len=max_kv_len).is_small is is_small


@pytest.mark.parametrize(
    ("spec", "heads", "blocks", "is_small"),
    [
        (mla_sm90_fp8(rows=16), 16, 64, True),
        (mla_sm90_fp8(rows=16), 16, 65, False),
        (mla_sm90_fp8(rows=17), 17, 1, False),
        (mla_sm90_fp8kv(rows=16), 16, 128, True),
        (mla_sm90_fp8kv(rows=16), 16, 129, False),
        (mla_sm90_fp8kv(rows=128), 128, 16, True),
        (mla_sm90_fp8kv(rows=128), 128, 17, False),
        (mla_sm90_fp8kv(rows=16, query_dtype=DType.E4M3, kv_dtype=DType.E4M3), 16, 65, False),
    ],
)
def test_what_is_small_depends_on_the_rows(
    spec: MlaSm90Spec, heads: int, blocks: int, is_small: bool
) -> None:
    """With queries in e4m3 the sm80 kernel is seldom the faster one."""
    problem = MlaProblemShape(
        batch=1, q_len=1, heads=heads, total_rows=heads, max_kv_len=64 * blocks
    )

    assert plan_mla_sm90(spec, problem, 1, SMS).is_small is is_small


@pytest.mark.parametrize(
    ("batch", "max_tokens", "fits"),
    # A unit of 64 rows is 6 positions longer than its blocks of 64 tokens.
    [(1, (2**31 - 7) * 64, True), (1, (2**31 - 6) * 64, False), (2**20, 2**17, False)],
)
def test_work_is_counted_in_32_bits(batch: int, max_tokens: int, fits: bool) -> None:
    """Units times their length are at the most 2^31 - 1."""
    planned = plan(batch=batch, heads=64, max_kv_len=1)

    assert planned.groups == batch
    assert fits_in_int32(mla_sm90(rows=64), planned, max_tokens) is fits


def test_without_query_tokens_there_is_nothing_to_launch() -> None:
    """No grid, and no workspace is asked for."""
    for nobody in (
        plan(batch=0, heads=16, max_kv_len=100),
        plan(batch=3, heads=16, max_kv_len=100, tokens=0),
    ):
        assert (nobody.blocks, nobody.workspace_bytes) == (0, 0)


@settings(deadline=None, max_examples=200)
@given(
    batch=st.integers(1, 600),
    heads=st.integers(1, 256),
    q_len=st.integers(1, 8),
    max_kv_len=st.integers(0, 200_000),
    is_ragged=st.booleans(),
    sm_count=st.integers(1, 160),
)
def test_all_blocks_run_at_once_in_whole_teams(
    batch: int, heads: int, q_len: int, max_kv_len: int, is_ragged: bool, sm_count: int
) -> None:
    """Blocks wait for each other, so there are no more than SMs; the workspace is bounded so."""
    planned = plan(
        batch=batch,
        heads=heads,
        q_len=q_len,
        max_kv_len=max_kv_len,
        tokens=batch * q_len if is_ragged else None,
        sm_count=sm_count,
    )

    assert 1 <= planned.cta_group_size <= 4
    assert planned.blocks == planned.num_cta_groups * planned.cta_group_size
    assert 1 <= planned.blocks <= sm_count
    assert planned.partial_rows_offset % 16 == 0
    assert planned.workspace_bytes <= sm_count * 257 * 1024
