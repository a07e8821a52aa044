"""How gqa_sm90 divides work: its schedule_range.cuh and tile_scheduler.cuh."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.templates.gqa_sm90_work import Item, Params, Request, items_of

# Tiles of tokens and units of each request; of the usual batch all alike.
request = st.builds(
    Request,
    tiles=st.one_of(st.integers(0, 5), st.integers(0, 300)),
    units=st.one_of(st.integers(0, 2), st.integers(0, 9)),
)
requests = st.one_of(
    st.lists(request, min_size=1, max_size=30).map(tuple),
    st.tuples(request, st.integers(1, 140)).map(lambda alike: (alike[0],) * alike[1]),
)


@settings(deadline=None, max_examples=400)
@given(requests=requests, teams=st.integers(1, 148))
@example(requests=(Request(300, 1),), teams=132)
@example(requests=(Request(0, 1),) * 30, teams=132)
@example(requests=(Request(1, 2), Request(0, 0), Request(2, 1), Request(0, 3)), teams=5)
@example(requests=(Request(0, 0),) * 5, teams=5)
def test_every_tile_is_computed_once_and_pieces_know_each_other(
    requests: tuple[Request, ...], teams: int
) -> None:
    """Pieces cover a unit without overlap, on spans that follow each other."""
    params = Params(requests, teams)

    by_unit: dict[tuple[int, int], list[Item]] = defaultdict(list)
    for team in range(teams):
        for item in items_of(params, team):
            by_unit[item.request, item.unit].append(item)

    assert set(by_unit) == {
        (index, unit) for index, known in enumerate(requests) for unit in range(known.units)
    }
    counters = []
    for (index, _), items in by_unit.items():
        edges = [edge for item in items for edge in (item.first_tile, item.last_tile)]
        assert (edges[0], edges[-1]) == (0, requests[index].tiles)
        assert edges[1:-1:2] == edges[2:-1:2]
        assert [item.piece for item in items] == list(range(len(items)))
        assert {item.pieces for item in items} == {len(items)}
        # Where merging looks for a piece.
        assert [item.team for item in items] == [items[0].first_span + i for i in range(len(items))]
        assert {item.first_span for item in items} == {items[0].team}
        if len(items) > 1:
            assert all(item.first_tile < item.last_tile for item in items)
            counters.append(items[0].first_span)
    assert len(counters) == len(set(counters))


@settings(deadline=None, max_examples=200)
@given(requests=requests, teams=st.integers(1, 148))
def test_a_span_leaves_two_pieces_at_the_most(requests: tuple[Request, ...], teams: int) -> None:
    """One that it begins with, which is not the first of its unit, and one that it ends with."""
    params = Params(requests, teams)

    for team in range(teams):
        items = list(items_of(params, team))
        assert all(item.piece == 0 for item in items[1:])
        assert all(item.pieces == 1 for item in items[1:-1])


@settings(deadline=None, max_examples=200)
@given(requests=requests, teams=st.integers(1, 148))
def test_teams_have_equal_stretches(requests: tuple[Request, ...], teams: int) -> None:
    """None has more than one position more than another, of those that have any."""
    params = Params(requests, teams)

    taken = [
        sum(max(item.last_tile - item.first_tile, 1) for item in items)
        for team in range(teams)
        if (items := list(items_of(params, team)))
    ]

    assert not taken or max(taken) - min(taken) <= 1
