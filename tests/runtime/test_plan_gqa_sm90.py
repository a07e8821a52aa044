"""How a grouped-query problem is spread over a Hopper GPU, against numbers worked out by hand."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.runtime.plan import GqaProblemShape
from mlagen.runtime.plan_gqa_sm90 import (
    GqaSm90Plan,
    fits_in_int32,
    heads_of_block,
    plan_gqa_sm90,
)
from mlagen.spec.dtype import DType
from tests.kernels import gqa_sm90

SMS = 132


def plan(
    *,
    batch: int,
    max_kv_len: int,
    kv_heads: int = 8,
    group: int = 8,
    q_len: int = 1,
    tokens: int | None = None,
    sm_count: int = SMS,
) -> GqaSm90Plan:
    """Return the plan of a bf16 problem; ``tokens`` are the query tokens of ragged requests."""
    problem = GqaProblemShape(
        batch=batch,
        q_len=q_len if tokens is None else 0,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        total_rows=(batch * q_len if tokens is None else tokens) * kv_heads * group,
        max_kv_len=max_kv_len,
    )
    return plan_gqa_sm90(gqa_sm90(rows=group * q_len), problem, sm_count)


class Worked(NamedTuple):
    """What a problem comes to."""

    problem: dict[str, int]
    cta_group_size: int
    num_cta_groups: int
    num_tiles: int


WORKED = {
    # Four kv heads of 256 bytes are 1024 together.
    "8 kv heads": Worked({"batch": 128, "max_kv_len": 4096}, 4, 33, 2),
    # Whole requests of 32 tiles, for four SMs more would save 2 us and cost more.
    "one kv head": Worked({"batch": 128, "max_kv_len": 4096, "kv_heads": 1}, 1, 128, 1),
    "3 kv heads": Worked({"batch": 128, "max_kv_len": 4096, "kv_heads": 3}, 3, 44, 1),
    "48 kv heads": Worked({"batch": 128, "max_kv_len": 4096, "kv_heads": 48}, 4, 33, 12),
    # 64 rows are two tiles: two blocks read the same tokens.
    "two tiles": Worked({"batch": 9, "max_kv_len": 4096, "group": 16, "q_len": 4}, 4, 33, 4),
    # Two units of 16 tiles: 6.6 us to read by two teams, 2.5 us by eight, and 1.7 us to merge.
    "a short request": Worked({"batch": 1, "max_kv_len": 2048}, 4, 8, 2),
    # Eight units of eight tiles: 32 SMs read as fast as 132.
    "whole units": Worked({"batch": 4, "max_kv_len": 1024}, 4, 8, 2),
    "nothing": Worked({"batch": 0, "max_kv_len": 512}, 4, 0, 2),
}


def e4m3_problem(*, batch: int, kv_heads: int = 8, max_kv_len: int = 4096) -> GqaProblemShape:
    """Return a problem whose blocks may take two kv heads."""
    return GqaProblemShape(
        batch=batch,
        q_len=1,
        heads=kv_heads * 8,
        kv_heads=kv_heads,
        total_rows=batch * kv_heads * 8,
        max_kv_len=max_kv_len,
    )


@pytest.mark.parametrize(
    ("batch", "kv_heads", "heads"),
    [
        (32, 8, 2),  # units of four pairs of heads: 32 for 33 teams
        (31, 8, 1),
        (64, 4, 2),  # units of two pairs: 64 for 66 teams
        (63, 4, 1),
        (500, 3, 1),  # no pairs
        (0, 8, 1),
    ],
)
def test_blocks_take_two_heads_where_nearly_all_sms_have_a_whole_unit(
    batch: int, kv_heads: int, heads: int
) -> None:
    """Else units would lie in more pieces, or leave SMs without work."""
    spec = gqa_sm90(kv_dtype=DType.E4M3)

    assert heads_of_block(spec, e4m3_problem(batch=batch, kv_heads=kv_heads), SMS) == heads
    assert heads_of_block(gqa_sm90(), e4m3_problem(batch=batch, kv_heads=kv_heads), SMS) == 1


def test_two_heads_of_a_block_are_one_part_of_a_request() -> None:
    """There are half as many parts, and a block leaves pieces of both."""
    spec = gqa_sm90(kv_dtype=DType.E4M3, heads_per_cta=2)

    found = plan_gqa_sm90(spec, e4m3_problem(batch=40), SMS)

    assert (found.cta_group_size, found.num_tiles, found.blocks) == (4, 1, 132)
    assert found.partial_rows_offset == 2 * 132 * 2 * 8 * 128 * 4
    assert found.workspace_bytes == found.partial_rows_offset + 2 * 132 * 2 * 8 * 8


def test_sms_that_turn_what_they_read_into_another_type_are_more() -> None:
    """A request of 64 tiles: 12.6 us by 32 SMs, 7.6 by 128, and 1.2 more to merge."""
    found = plan_gqa_sm90(
        gqa_sm90(kv_dtype=DType.E4M3), e4m3_problem(batch=1, max_kv_len=16384), SMS
    )

    assert found.num_cta_groups == 16


@pytest.mark.parametrize("worked", WORKED.values(), ids=WORKED)
def test_a_grid_is_teams_of_neighbours(worked: Worked) -> None:
    """As large as memory likes, and as many as take the least time."""
    found = plan(**worked.problem)

    assert (found.cta_group_size, found.num_cta_groups, found.num_tiles) == worked[1:]
    assert found.blocks == found.cta_group_size * found.num_cta_groups


def test_the_workspace_holds_two_pieces_of_each_block() -> None:
    """Values in fp32, and then two numbers for each row."""
    found = plan(batch=128, max_kv_len=4096)

    assert found.partial_rows_offset == 2 * 132 * 8 * 128 * 4
    assert found.workspace_bytes == found.partial_rows_offset + 2 * 132 * 8 * 8


def test_ragged_requests_are_counted_by_their_tokens() -> None:
    """Any of them may begin a tile more than its rows fill; no SM is left out, for they differ."""
    found = plan(batch=3, max_kv_len=4096, q_len=4, tokens=7)

    assert found.row_tiles == 0
    assert found.all_tiles == found.num_tiles * (3 + 7 * 8 // 32)
    assert found.blocks == 132


@settings(deadline=None)
@given(
    kv_heads=st.integers(1, 200),
    group=st.integers(1, 40),
    q_len=st.integers(1, 5),
    sm_count=st.integers(1, 160),
)
def test_teams_take_all_parts_of_a_request(
    kv_heads: int, group: int, q_len: int, sm_count: int
) -> None:
    """No member of a team is without work, and teams fit the GPU."""
    found = plan(
        batch=500, max_kv_len=9000, kv_heads=kv_heads, group=group, q_len=q_len, sm_count=sm_count
    )

    assert found.num_tiles * found.cta_group_size == kv_heads * found.row_tiles
    assert 1 <= found.blocks <= sm_count


def test_a_line_too_long_for_32_bits_is_known() -> None:
    """Positions are multiplied by the number of teams."""
    found = plan(batch=1 << 10, max_kv_len=4096, sm_count=128)  # 2^11 units, 32 teams

    assert fits_in_int32(gqa_sm90(), found, ((1 << 16) - 1) * 128)
    assert not fits_in_int32(gqa_sm90(), found, (1 << 16) * 128)
