"""The stream-K schedule of gqa_sm90: `schedule_range.cuh` and `tile_scheduler.cuh`."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.templates.gqa_sm90_schedule import Params, SeqInfo, WorkItem, work_items_of

seq_infos = st.builds(
    SeqInfo,
    num_kv_blocks=st.one_of(st.integers(0, 5), st.integers(0, 300)),
    num_tiles=st.one_of(st.integers(0, 2), st.integers(0, 9)),
)
# Sequences of any shapes, or a batch of equal ones.
batches = st.one_of(
    st.lists(seq_infos, min_size=1, max_size=30).map(tuple),
    st.tuples(seq_infos, st.integers(1, 140)).map(lambda equal: (equal[0],) * equal[1]),
)


@settings(deadline=None, max_examples=400)
@given(seqs=batches, num_cta_groups=st.integers(1, 148))
@example(seqs=(SeqInfo(300, 1),), num_cta_groups=132)
@example(seqs=(SeqInfo(0, 1),) * 30, num_cta_groups=132)
@example(seqs=(SeqInfo(1, 2), SeqInfo(0, 0), SeqInfo(2, 1), SeqInfo(0, 3)), num_cta_groups=5)
@example(seqs=(SeqInfo(0, 0),) * 5, num_cta_groups=5)
def test_splits_cover_every_work_tile_once(seqs: tuple[SeqInfo, ...], num_cta_groups: int) -> None:
    """Splits cover a work tile without overlap, on consecutive ranges, and number themselves."""
    params = Params(seqs, num_cta_groups)

    by_tile: dict[tuple[int, int], list[WorkItem]] = defaultdict(list)
    for cta_group in range(num_cta_groups):
        for work in work_items_of(params, cta_group):
            by_tile[work.seq_idx, work.tile].append(work)

    assert set(by_tile) == {
        (seq_idx, tile)
        for seq_idx, seq_info in enumerate(seqs)
        for tile in range(seq_info.num_tiles)
    }
    semaphores = []
    for (seq_idx, _), splits in by_tile.items():
        edges = [edge for work in splits for edge in (work.first_kv_block, work.end_kv_block)]
        assert (edges[0], edges[-1]) == (0, seqs[seq_idx].num_kv_blocks)
        assert edges[1:-1:2] == edges[2:-1:2]
        assert [work.split_idx for work in splits] == list(range(len(splits)))
        assert {work.num_splits for work in splits} == {len(splits)}
        # partial_slot addresses a split by its distance from the first one.
        first_range = splits[0].first_range
        assert [work.cta_group for work in splits] == [first_range + i for i in range(len(splits))]
        assert {work.first_range for work in splits} == {splits[0].cta_group}
        if len(splits) > 1:
            assert all(work.first_kv_block < work.end_kv_block for work in splits)
            semaphores.append(first_range)
    assert len(semaphores) == len(set(semaphores))


@settings(deadline=None, max_examples=200)
@given(seqs=batches, num_cta_groups=st.integers(1, 148))
def test_a_range_holds_at_most_two_splits(seqs: tuple[SeqInfo, ...], num_cta_groups: int) -> None:
    """A range begins with at most one later split of a work tile, and ends with a first one."""
    params = Params(seqs, num_cta_groups)

    for cta_group in range(num_cta_groups):
        works = list(work_items_of(params, cta_group))
        assert all(work.split_idx == 0 for work in works[1:])
        assert all(work.num_splits == 1 for work in works[1:-1])


@settings(deadline=None, max_examples=200)
@given(seqs=batches, num_cta_groups=st.integers(1, 148))
def test_ranges_are_equal(seqs: tuple[SeqInfo, ...], num_cta_groups: int) -> None:
    """The ranges of CTA groups with work differ by at most one linear KV block."""
    params = Params(seqs, num_cta_groups)

    taken = [
        sum(max(work.end_kv_block - work.first_kv_block, 1) for work in works)
        for cta_group in range(num_cta_groups)
        if (works := list(work_items_of(params, cta_group)))
    ]

    assert not taken or max(taken) - min(taken) <= 1
