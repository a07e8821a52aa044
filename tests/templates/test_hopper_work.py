"""How the sm90 kernel divides work: schedule_range.cuh and tile_scheduler.cuh."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlagen.runtime import plan_mla_sm90
from tests.templates.hopper_work import (
    LEAST_SPAN,
    UNIT_COSTS,
    Params,
    all_items,
    ceil_div,
    find_span,
)

# Blocks of tokens and tiles of rows of each request; of the usual batch all alike.
request = st.tuples(
    st.one_of(st.integers(0, 5), st.integers(0, 300)),
    st.one_of(st.integers(0, 2), st.integers(0, 9)),
)
requests = st.one_of(
    st.lists(request, min_size=1, max_size=30),
    st.tuples(request, st.integers(1, 140)).map(lambda alike: [alike[0]] * alike[1]),
)


@pytest.mark.parametrize("unit_cost", UNIT_COSTS)
@settings(deadline=None, max_examples=300)
@given(requests=requests, teams=st.integers(1, 148), team_size=st.integers(1, 4))
@example(requests=[(300, 1)], teams=132, team_size=1)
@example(requests=[(0, 1)] * 30, teams=132, team_size=1)
@example(requests=[(1, 2), (0, 0), (2, 1), (0, 3)], teams=5, team_size=2)
@example(requests=[(64, 2)] * 33, teams=66, team_size=2)
@example(requests=[(64, 1)] * 66, teams=132, team_size=1)
def test_every_block_of_tokens_is_computed_once_and_merged_by_one(
    requests: list[tuple[int, int]], teams: int, team_size: int, unit_cost: int
) -> None:
    """Pieces cover a tile without overlap, are numbered in order, and agree on who has the first.

    Who waits for others has a later block of the grid than they, and an owner has one such tile.
    """
    blocks, tiles = zip(*requests, strict=True)
    params = Params(blocks, tiles, teams, team_size, unit_cost)

    by_tile = defaultdict(list)
    for item in all_items(params):
        by_tile[item.request, item.tile].append(item)

    assert set(by_tile) == {
        (request, tile) for request, count in enumerate(tiles) for tile in range(count)
    }
    owners = []
    for (request, _), items in by_tile.items():
        items.sort(key=lambda item: item.first_block)
        edges = [edge for item in items for edge in (item.first_block, item.last_block)]
        assert (edges[0], edges[-1]) == (0, blocks[request])
        assert edges[1:-1:2] == edges[2:-1:2]
        assert [item.piece for item in items] == list(range(len(items)))
        assert {item.pieces for item in items} == {len(items)}
        assert {item.owner for item in items} == {items[0].block}
        # Where merging looks for a piece, and that nobody waits for a block after its own.
        assert [item.block for item in items] == [
            items[0].owner - item.piece * team_size for item in items
        ]
        assert all(item.block >= 0 for item in items)
        if len(items) > 1:
            owners.append(items[0].owner)
    # Counters belong to an owner, and so does the place of its own piece.
    assert len(owners) == len(set(owners))


@pytest.mark.parametrize("unit_cost", UNIT_COSTS)
@settings(deadline=None, max_examples=200)
@given(requests=requests, teams=st.integers(1, 148), team_size=st.integers(1, 4))
def test_a_block_of_the_grid_leaves_two_pieces_at_the_most(
    requests: list[tuple[int, int]], teams: int, team_size: int, unit_cost: int
) -> None:
    """One that it begins with, which is not the first of its tile, and one that it ends with."""
    blocks, tiles = zip(*requests, strict=True)
    params = Params(blocks, tiles, teams, team_size, unit_cost)

    by_block = defaultdict(list)
    for item in all_items(params):
        by_block[item.block].append(item)

    for block, items in by_block.items():
        assert 0 <= block < teams * team_size
        assert [item.order for item in items] == list(range(len(items)))
        assert all(item.piece == 0 for item in items[1:])
        assert all(item.pieces == 1 for item in items[1:-1])


@pytest.mark.parametrize("unit_cost", UNIT_COSTS)
@settings(deadline=None, max_examples=300)
@given(requests=requests, teams=st.integers(1, 148), team_size=st.integers(1, 4))
@example(requests=[(64, 1)] * 66, teams=132, team_size=1)
@example(requests=[(16, 2)] * 16, teams=66, team_size=2)
def test_who_merges_waits_for_nobody_who_waits_for_it(
    requests: list[tuple[int, int]], teams: int, team_size: int, unit_cost: int
) -> None:
    """All pieces but the last are merged where they end their span, and so may the last be.

    Mergers wait for every other piece, which must not come behind another wait for theirs.
    """
    blocks, tiles = zip(*requests, strict=True)
    params = Params(blocks, tiles, teams, team_size, unit_cost)

    by_block = defaultdict(list)
    for item in all_items(params):
        by_block[item.block].append(item)

    for items in by_block.values():
        for item in items:
            assert item.mergers in (item.pieces - 1, item.pieces) or item.pieces == 1
            if item.pieces > 1 and item.piece < item.mergers:
                assert item is items[-1]


@settings(deadline=None, max_examples=300)
@given(
    request=st.tuples(st.integers(1, 300), st.integers(1, 9)),
    count=st.integers(1, 140),
    teams=st.integers(1, 148),
    team_size=st.integers(1, 4),
)
@example(request=(65, 1), count=64, teams=132, team_size=1)
@example(request=(17, 1), count=32, teams=132, team_size=1)
def test_alike_requests_are_cut_alike_or_by_their_length(
    request: tuple[int, int], count: int, teams: int, team_size: int
) -> None:
    """Where spans are aligned no piece lies on two, and all units have as many pieces."""
    params = Params((request[0],) * count, (request[1],) * count, teams, team_size)
    span = find_span(params, 0)
    assert span is not None
    if span.unit_cost:  # spans are not aligned
        return
    units = count * ceil_div(request[1], team_size)

    items = all_items(params)

    assert {item.pieces for item in items} == {max(span.spans // units, 1)}
    assert {item.mergers for item in items} == {item.pieces for item in items}
    if span.spans >= units:
        assert {item.order for item in items} == {0}


def test_the_host_plans_with_the_numbers_of_the_kernel() -> None:
    """What a unit costs and how short a span may be is written in both."""
    assert (plan_mla_sm90._SWAP_AB_OVERHEAD_BLOCKS, plan_mla_sm90._OVERHEAD_BLOCKS) == UNIT_COSTS
    assert plan_mla_sm90._MIN_BLOCKS_PER_RANGE == LEAST_SPAN
