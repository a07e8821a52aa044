"""The stream-K schedule of the sm90 MLA kernels covers all work and cannot deadlock."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.templates.sm90_schedule import (
    FIXED_OVERHEAD_BLOCKS,
    Params,
    all_work_items,
    ceil_div,
    find_range,
)

# KV blocks and row tiles of each sequence, of mixed batches and of uniform ones.
seq = st.tuples(
    st.one_of(st.integers(0, 5), st.integers(0, 300)),
    st.one_of(st.integers(0, 2), st.integers(0, 9)),
)
seqs = st.one_of(
    st.lists(seq, min_size=1, max_size=30),
    st.tuples(seq, st.integers(1, 140)).map(lambda uniform: [uniform[0]] * uniform[1]),
)
cta_groups = st.integers(1, 148)
group_sizes = st.integers(1, 4)


@pytest.mark.parametrize("fixed_overhead_blocks", FIXED_OVERHEAD_BLOCKS)
@settings(deadline=None, max_examples=300)
@given(seqs=seqs, num_cta_groups=cta_groups, cta_group_size=group_sizes)
@example(seqs=[(300, 1)], num_cta_groups=132, cta_group_size=1)
@example(seqs=[(0, 1)] * 30, num_cta_groups=132, cta_group_size=1)
@example(seqs=[(1, 2), (0, 0), (2, 1), (0, 3)], num_cta_groups=5, cta_group_size=2)
@example(seqs=[(64, 2)] * 33, num_cta_groups=66, cta_group_size=2)
@example(seqs=[(64, 1)] * 66, num_cta_groups=132, cta_group_size=1)
def test_every_kv_block_belongs_to_one_split(
    seqs: list[tuple[int, int]],
    num_cta_groups: int,
    cta_group_size: int,
    fixed_overhead_blocks: int,
) -> None:
    """The splits of a tile cover it in order, on earlier CTAs, with a first CTA of their own."""
    kv_blocks, m_tiles = zip(*seqs, strict=True)
    params = Params(kv_blocks, m_tiles, num_cta_groups, cta_group_size, fixed_overhead_blocks)

    by_tile = defaultdict(list)
    for work in all_work_items(params):
        by_tile[work.seq_idx, work.m_tile].append(work)

    assert set(by_tile) == {
        (seq_idx, m_tile) for seq_idx, count in enumerate(m_tiles) for m_tile in range(count)
    }
    first_split_ctas = []
    for (seq_idx, _), splits in by_tile.items():
        splits.sort(key=lambda split: split.first_kv_block)
        edges = [edge for split in splits for edge in (split.first_kv_block, split.end_kv_block)]
        assert (edges[0], edges[-1]) == (0, kv_blocks[seq_idx])
        assert edges[1:-1:2] == edges[2:-1:2]
        assert [split.split_idx for split in splits] == list(range(len(splits)))
        assert {split.num_splits for split in splits} == {len(splits)}
        assert {split.first_split_cta for split in splits} == {splits[0].cta}
        # PartialSlots computes these CTAs, each at most that of the waiting split 0.
        assert [split.cta for split in splits] == [
            splits[0].first_split_cta - split.split_idx * cta_group_size for split in splits
        ]
        assert all(split.cta >= 0 for split in splits)
        if len(splits) > 1:
            first_split_ctas.append(splits[0].first_split_cta)
    # A semaphore, and the slot of split 0, belong to the first CTA of one tile.
    assert len(first_split_ctas) == len(set(first_split_ctas))


@pytest.mark.parametrize("fixed_overhead_blocks", FIXED_OVERHEAD_BLOCKS)
@settings(deadline=None, max_examples=200)
@given(seqs=seqs, num_cta_groups=cta_groups, cta_group_size=group_sizes)
def test_a_cta_stores_at_most_two_splits(
    seqs: list[tuple[int, int]],
    num_cta_groups: int,
    cta_group_size: int,
    fixed_overhead_blocks: int,
) -> None:
    """Only the first work item of a CTA may be a later split, and only its ends may be splits."""
    kv_blocks, m_tiles = zip(*seqs, strict=True)
    params = Params(kv_blocks, m_tiles, num_cta_groups, cta_group_size, fixed_overhead_blocks)

    by_cta = defaultdict(list)
    for work in all_work_items(params):
        by_cta[work.cta].append(work)

    for cta, items in by_cta.items():
        assert 0 <= cta < num_cta_groups * cta_group_size
        assert [work.work_idx for work in items] == list(range(len(items)))
        assert all(work.split_idx == 0 for work in items[1:])
        assert all(work.num_splits == 1 for work in items[1:-1])


@pytest.mark.parametrize("fixed_overhead_blocks", FIXED_OVERHEAD_BLOCKS)
@settings(deadline=None, max_examples=300)
@given(seqs=seqs, num_cta_groups=cta_groups, cta_group_size=group_sizes)
@example(seqs=[(64, 1)] * 66, num_cta_groups=132, cta_group_size=1)
@example(seqs=[(16, 2)] * 16, num_cta_groups=66, cta_group_size=2)
def test_a_reducer_waits_in_its_last_work_item(
    seqs: list[tuple[int, int]],
    num_cta_groups: int,
    cta_group_size: int,
    fixed_overhead_blocks: int,
) -> None:
    """A reducer waits for all splits of a tile, so no split of its CTA may follow the wait."""
    kv_blocks, m_tiles = zip(*seqs, strict=True)
    params = Params(kv_blocks, m_tiles, num_cta_groups, cta_group_size, fixed_overhead_blocks)

    by_cta = defaultdict(list)
    for work in all_work_items(params):
        by_cta[work.cta].append(work)

    for items in by_cta.values():
        for work in items:
            assert work.num_reducers in (work.num_splits - 1, work.num_splits) or (
                work.num_splits == 1
            )
            if work.num_splits > 1 and work.split_idx < work.num_reducers:
                assert work is items[-1]


@settings(deadline=None, max_examples=300)
@given(
    seq=st.tuples(st.integers(1, 300), st.integers(1, 9)),
    count=st.integers(1, 140),
    num_cta_groups=cta_groups,
    cta_group_size=group_sizes,
)
@example(seq=(65, 1), count=64, num_cta_groups=132, cta_group_size=1)
@example(seq=(17, 1), count=32, num_cta_groups=132, cta_group_size=1)
def test_tiles_of_a_uniform_batch_have_equal_splits_if_ranges_are_aligned(
    seq: tuple[int, int], count: int, num_cta_groups: int, cta_group_size: int
) -> None:
    """Aligned ranges give every tile the same number of whole ranges, all of them reducers."""
    params = Params((seq[0],) * count, (seq[1],) * count, num_cta_groups, cta_group_size)
    schedule_range = find_range(params, 0)
    assert schedule_range is not None
    if schedule_range.fixed_overhead_blocks:  # ranges are not aligned
        return
    num_tiles = count * ceil_div(seq[1], cta_group_size)

    items = all_work_items(params)

    assert {work.num_splits for work in items} == {max(schedule_range.num_ranges // num_tiles, 1)}
    assert {work.num_reducers for work in items} == {work.num_splits for work in items}
    if schedule_range.num_ranges >= num_tiles:
        assert {work.work_idx for work in items} == {0}
