"""The stream-K schedules of the sm90 kernels cover all work and cannot deadlock.

The tile schedulers are those of the kernels, built for the CPU.
"""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from mlagen.spec.gqa import sm90
from mlagen.spec.gqa.sm90 import GqaSm90Spec
from mlagen.spec.mla.sm90 import MlaSm90Spec
from tests.emulator.emulated import COMPILER
from tests.emulator.scheduled import MAX_WORK_ITEMS, Schedule, TileScheduler, WorkItem
from tests.kernels import SM_COUNTS, gqa_sm90, mla_sm90
from tests.launch_repeats import SEQ_WORD
from tests.templates.schedules import (
    MAX_TOKENS,
    NO_WINDOW,
    Batch,
    Seq,
    Tile,
    by_tile,
    ints,
    planned,
    schedule_of,
    tiles_of,
)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

MLA = {"mla, 16 rows": mla_sm90(rows=16), "mla, 64 rows": mla_sm90(rows=64)}
SPECS: dict[str, MlaSm90Spec | GqaSm90Spec] = {**MLA, "gqa": gqa_sm90()}

Compiled = Callable[[str], TileScheduler]


lengths = st.one_of(st.integers(0, 5 * 128), st.integers(0, 300 * 64))
seqs = st.builds(Seq, lengths, st.one_of(st.just(1), st.integers(0, 9)))
batches = st.builds(
    Batch,
    seqs=st.one_of(
        st.lists(seqs, min_size=1, max_size=30).map(tuple),
        st.tuples(seqs, st.integers(1, 140)).map(lambda equal: (equal[0],) * equal[1]),
    ),
    heads=st.sampled_from((1, 7, 16, 64)),
    num_cta_groups=st.one_of(st.integers(1, 24), st.sampled_from((33, 39, 57, 148, *SM_COUNTS))),
    cta_group_size=st.integers(1, 4),
    is_causal=st.booleans(),
    window=st.sampled_from((1, 100, 1000, NO_WINDOW)),
).filter(lambda batch: batch.num_cta_groups * batch.cta_group_size <= 148)
_settings = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    """Return what compiles the tile scheduler of a spec, once."""
    specs = {**SPECS, "mla, fixed splits": mla_sm90(rows=64, batch_invariant=True)}
    return cache(lambda name: TileScheduler(specs[name]))


@pytest.fixture(params=SPECS)
def scheduler(request: pytest.FixtureRequest, compiled: Compiled) -> TileScheduler:
    """Return the tile scheduler of one spec."""
    return compiled(request.param)


def check_cover(scheduler: TileScheduler, batch: Batch, schedule: Schedule) -> None:
    """Check that every KV block of every tile belongs to one split, and how splits are numbered."""
    is_mla = isinstance(scheduler.spec, MlaSm90Spec)
    expected = tiles_of(scheduler, batch)
    found = by_tile(schedule)
    assert found.keys() == expected.keys()
    first_split_ctas = []
    for tile, splits in found.items():
        blocks, *ends = expected[tile]
        parts = [split for split in splits if split.num_kv_blocks]
        edges = [edge for split in parts for edge in (split.first_kv_block, split.end_kv_block)]
        assert edges[:1] + edges[-1:] == ([blocks.start, blocks.stop] if len(blocks) else [])
        assert edges[1:-1:2] == edges[2:-1:2]
        assert {(split.kv_end, split.unmasked_kv_end) for split in splits} == {tuple(ends)}
        q_len = batch.seqs[tile.seq_idx].q_len
        rows = min(scheduler.spec.block_m, q_len * batch.heads - tile.first_row)
        first_query = sum(seq.q_len for seq in batch.seqs[: tile.seq_idx])
        assert {(split.rows, split.first_query) for split in splits} == {(rows, first_query)}
        assert [split.split_idx for split in splits] == list(range(len(splits)))
        assert {split.num_splits for split in splits} == {len(splits)}
        # Partial outputs are found by these CTAs; those of MLA wait for splits of earlier ones.
        step = -batch.cta_group_size if is_mla else batch.cta_group_size
        assert {split.first_split_cta for split in splits} == {splits[0].cta}
        assert [split.cta for split in splits] == [
            splits[0].cta + split.split_idx * step for split in splits
        ]
        if len(splits) > 1:
            first_split_ctas.append(splits[0].first_split_cta)
    # A semaphore, and the slot of split 0, belong to the first CTA of one tile.
    assert len(first_split_ctas) == len(set(first_split_ctas))


@_settings
@given(batch=batches)
@example(batch=Batch((Seq(300 * 64),)))
@example(batch=Batch((Seq(0),) * 30))
@example(batch=Batch((Seq(0, 0), Seq(0, 0))))
@example(batch=Batch((Seq(64, 2), Seq(0, 0), Seq(128, 1), Seq(0, 3)), 64, 5, 2))
@example(batch=Batch((Seq(64 * 64, 2),) * 33, 64, 66, 2))
@example(batch=Batch((Seq(64 * 64),) * 66, 64))
@example(batch=Batch((Seq(1000), Seq(70), Seq(0)) * 50, 16, 40))
def test_every_kv_block_belongs_to_one_split(scheduler: TileScheduler, batch: Batch) -> None:
    """The splits of a tile cover it in order, on CTAs that number themselves."""
    check_cover(scheduler, batch, schedule_of(scheduler, batch))


@pytest.mark.parametrize("count", [1, 2, 60])
def test_linear_block_indices_fill_int32(scheduler: TileScheduler, count: int) -> None:
    """Sequences are as long as the host lets them be, and no KV block is lost."""
    spec = scheduler.spec
    max_blocks = (2**31 - 1) // count - spec.fixed_overhead_blocks
    kv_len = min(max_blocks * spec.block_n, MAX_TOKENS)
    uniform = Batch((Seq(kv_len),) * count, spec.block_m)
    for batch in (uniform, replace(uniform, seqs=(*uniform.seqs[1:], Seq(kv_len - 64)))):
        check_cover(scheduler, batch, schedule_of(scheduler, batch))


@_settings
@given(batch=batches)
def test_a_cta_stores_at_most_two_splits(scheduler: TileScheduler, batch: Batch) -> None:
    """Only the first work item of a CTA may be a later split, and only its ends may be splits."""
    by_head = defaultdict(list)
    for work in schedule_of(scheduler, batch).work_items:
        by_head[work.cta, work.kv_head].append(work)
    for (cta, _), work_items in by_head.items():
        assert 0 <= cta < batch.num_cta_groups * batch.cta_group_size
        assert [work.work_idx for work in work_items] == sorted(
            {work.work_idx for work in work_items}
        )
        assert all(work.split_idx == 0 for work in work_items[1:])
        assert all(work.num_splits == 1 for work in work_items[1:-1])


@_settings
@given(batch=batches)
def test_ranges_are_equally_long(scheduler: TileScheduler, batch: Batch) -> None:
    """The ranges of the CTA groups divide all work, and differ by one KV block at most."""
    spec = scheduler.spec
    # Whole tiles differ by more.
    changes = {} if isinstance(spec, MlaSm90Spec) else {"takes_whole_tiles": 0}
    ranges = schedule_of(scheduler, batch, **changes).ranges

    edges = sorted({(one.begin, one.end) for one in ranges})
    assert [end for _, end in edges[:-1]] == [begin for begin, _ in edges[1:]]
    lengths = [end - begin for begin, end in edges]
    assert not lengths or max(lengths) - min(lengths) <= 1
    assert len(edges) <= batch.num_cta_groups
    overhead = {one.fixed_overhead_blocks for one in ranges}
    assert len(overhead) <= 1
    if isinstance(spec, MlaSm90Spec) and ranges and overhead != {0}:
        rows = spec.block_m * batch.cta_group_size
        assert edges[-1][1] == sum(
            -(-seq.q_len * batch.heads // rows)
            * (-(-seq.kv_len // spec.block_n) + spec.fixed_overhead_blocks)
            for seq in batch.seqs
        )


@pytest.fixture(scope="module")
def fixed_splits() -> Iterator[TileScheduler]:
    """Return the tile scheduler of a batch-invariant kernel, with few and short splits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90, "_SPLIT_TOKENS", 256)
        patch.setattr(sm90, "_MAX_SPLITS", (16,))
        yield TileScheduler(gqa_sm90(batch_invariant=True))


@_settings
@given(batch=batches)
@example(batch=Batch((Seq(17 * 256), Seq(16 * 256 - 1), Seq(0)) * 20, 8, 33, 2))
@example(batch=Batch((Seq(33 * 256 + 1, 9),) * 40, 8, 33, 2, is_causal=True, window=4096))
def test_fixed_splits_follow_from_their_sequence_alone(
    fixed_splits: TileScheduler, batch: Batch
) -> None:
    """Evenly cut by the KV blocks of their sequence, and CTAs have them in order."""
    expected = tiles_of(fixed_splits, batch)
    cuts: dict[Tile, tuple[int, int, int]] = {}  # first KV block, KV blocks, splits
    for tile in expected:
        kv_len, q_len = batch.seqs[tile.seq_idx]
        first = max(kv_len - q_len + 1 - batch.window, 0) // 128 if batch.is_causal else 0
        blocks = -(-kv_len // 128) - first
        cuts[tile] = first, blocks, next(n for n in (16, 8, 4, 2, 1) if n == 1 or blocks >= 2 * n)
    assume(sum(count for *_, count in cuts.values()) <= MAX_WORK_ITEMS)
    schedule = schedule_of(fixed_splits, batch)
    found = by_tile(schedule)
    assert found.keys() == expected.keys()
    for tile, splits in found.items():
        first, blocks, count = cuts[tile]
        assert [split.split_idx for split in splits] == list(range(count))
        for split in splits:
            mine = range(split.first_kv_block, split.end_kv_block)
            ends = [first + (split.split_idx + i) * blocks // count for i in (0, 1)]
            assert split.num_splits == count
            assert set(mine) == set(expected[tile].kv_blocks).intersection(range(*ends))
    for rank in range(batch.cta_group_size):
        works = [work for work in schedule.work_items if work.cta % batch.cta_group_size == rank]
        assert [work.first_split_cta + work.split_idx for work in works] == list(range(len(works)))


@_settings
@given(batch=batches)
@example(batch=Batch((Seq(300 * 64), Seq(0), Seq(64 * 64, 9)) * 9, 64, 33, 2))
def test_fixed_splits_of_mla_are_equally_long_and_have_slots(
    compiled: Compiled, batch: Batch
) -> None:
    """Their number follows from the length of the sequence alone; no two share a slot.

    Where CTA groups have lists of them, no group has more than the longest one above another.
    """
    counts = {"min_split_blocks": 2, "max_split_blocks": 8, "split_product": 64, "max_splits": 16}
    scheduler = compiled("mla, fixed splits")
    semaphores = ints([0] * 4)
    schedule = schedule_of(scheduler, batch, semaphores=semaphores, num_slots=1 << 20, **counts)
    expected = tiles_of(scheduler, batch)
    found = by_tile(schedule)
    assert found.keys() == expected.keys()
    slots = []
    loads: Counter[int] = Counter()
    longest = 0
    for tile, splits in found.items():
        blocks = -(-batch.seqs[tile.seq_idx].kv_len // 64)
        most = min(max(64 // max(blocks, 1), 2), 8)
        per_split = -(-blocks // max(min(-(-blocks // most), 16), 1))
        count = max(-(-blocks // max(per_split, 1)), 1)
        assert [split.split_idx for split in splits] == list(range(count))
        for split in splits:
            begin = split.split_idx * per_split
            attended = expected[tile].kv_blocks.stop
            assert split.num_splits == split.num_reducers == count
            assert split.first_kv_block == begin
            assert split.num_kv_blocks == max(min(begin + per_split, attended) - begin, 0)
            if count > 1:
                assert split.first_split_cta == splits[0].first_split_cta
                slots.append(split.first_split_cta + split.split_idx * batch.cta_group_size)
            if split.cta % batch.cta_group_size == 0:
                loads[split.cta] += per_split
                longest = max(longest, per_split)
    if all(one.begin == 0 for one in schedule.ranges) and loads:
        idle = schedule.ranges[0].num_ranges - len(loads)
        assert max(loads.values()) - (0 if idle else min(loads.values())) <= longest
    assert len(slots) == len(set(slots))
    tiles = sum(-(-seq.q_len * batch.heads // 64) + batch.cta_group_size for seq in batch.seqs)
    assert max(slots, default=0) < tiles * 16


@_settings
@given(batch=batches, sm_count=st.sampled_from(SM_COUNTS))
@example(batch=Batch((Seq(64 * 64, 4),) * 40, 64), sm_count=78)
@example(batch=Batch((Seq(20 * 64),) * 64), sm_count=78)
@example(batch=Batch((Seq(299 * 64), Seq(300 * 64)) * 60), sm_count=144)
@pytest.mark.parametrize("name", MLA)
def test_a_planned_cta_group_is_idle_only_if_its_range_would_save_less_than_a_split(
    name: str, compiled: Compiled, batch: Batch, sm_count: int
) -> None:
    """The grid of the host covers all work, on any number of SMs."""
    scheduler = compiled(name)
    assert isinstance(scheduler.spec, MlaSm90Spec)
    batch = planned(batch, scheduler.spec, sm_count)
    schedule = schedule_of(scheduler, batch)
    check_cover(scheduler, batch, schedule)
    if schedule.ranges:
        num_cta_groups = sm_count // batch.cta_group_size
        assert 1 <= batch.num_cta_groups <= num_cta_groups
        num_ranges = schedule.ranges[0].num_ranges
        total_blocks = max(one.end for one in schedule.ranges)
        saved = -(-total_blocks // num_ranges) - total_blocks / num_cta_groups
        assert num_ranges == num_cta_groups or saved < scheduler.spec.split_overhead_blocks + 1


@_settings
@given(batch=batches)
@example(batch=Batch((Seq(64 * 64),) * 66, 64))
@example(batch=Batch((Seq(16 * 64, 2),) * 16, 64, 66, 2))
@pytest.mark.parametrize("name", MLA)
def test_a_reducer_waits_in_its_last_work_item(name: str, compiled: Compiled, batch: Batch) -> None:
    """A reducer waits for all splits of a tile, so no split of its CTA may follow the wait."""
    by_cta = defaultdict(list)
    for work in schedule_of(compiled(name), batch).work_items:
        by_cta[work.cta].append(work)
    for work_items in by_cta.values():
        for work in work_items:
            if work.num_splits > 1:
                assert work.num_reducers in (work.num_splits - 1, work.num_splits)
                assert work is work_items[-1] or work.split_idx >= work.num_reducers


@_settings
@given(
    seq=st.builds(Seq, st.integers(1, 300 * 64), st.integers(1, 9)),
    count=st.integers(1, 140),
    num_cta_groups=st.integers(1, 148),
)
@example(seq=Seq(65 * 64), count=64, num_cta_groups=132)
@example(seq=Seq(17 * 64), count=32, num_cta_groups=132)
@pytest.mark.parametrize("name", MLA)
def test_tiles_of_a_uniform_batch_have_equal_splits_if_ranges_are_aligned(
    name: str, compiled: Compiled, seq: Seq, count: int, num_cta_groups: int
) -> None:
    """Aligned ranges give every tile the same number of whole ranges, all of them reducers."""
    scheduler = compiled(name)
    batch = Batch((seq,) * count, scheduler.spec.block_m, num_cta_groups)
    ranges, work_items = schedule_of(scheduler, batch)
    if ranges[0].fixed_overhead_blocks:  # ranges are not aligned
        return

    num_tiles = count * seq.q_len

    assert {work.num_splits for work in work_items} == {max(ranges[0].num_ranges // num_tiles, 1)}
    assert {work.num_reducers for work in work_items} == {work.num_splits for work in work_items}
    if ranges[0].num_ranges >= num_tiles:
        assert {work.work_idx for work in work_items} == {0}


@_settings
@given(seq=st.builds(Seq, st.integers(0, 300 * 64), st.integers(1, 9)), count=st.integers(1, 140))
@example(seq=Seq(4096), count=128)
@pytest.mark.parametrize("num_cta_groups", [1, 33, 64])
def test_no_tile_of_a_uniform_gqa_batch_is_split_if_ranges_have_several(
    compiled: Compiled, seq: Seq, count: int, num_cta_groups: int
) -> None:
    """The host asks for whole tiles, and the lengths are equal."""
    batch = Batch((seq,) * count, num_cta_groups=num_cta_groups, heads=8)
    num_tiles = count * seq.q_len

    work_items = schedule_of(compiled("gqa"), batch).work_items

    if num_tiles < 2 * num_cta_groups:
        return
    assert {work.num_splits for work in work_items} == {1}
    assert len(work_items) == num_tiles
    counts = Counter(work.cta for work in work_items).values()
    assert max(counts) <= -(-num_tiles // num_cta_groups)


def test_ranges_are_aligned_if_few_cta_groups_stay_idle(compiled: Compiled) -> None:
    """A uniform batch of 64 tiles takes 128 of 132 CTA groups, one of 50 all of them."""
    scheduler = compiled("mla, 16 rows")
    aligned = schedule_of(scheduler, Batch((Seq(65 * 64),) * 64)).ranges[0]
    unaligned = schedule_of(scheduler, Batch((Seq(65 * 64),) * 50)).ranges[0]
    assert (aligned.num_ranges, aligned.fixed_overhead_blocks) == (128, 0)
    assert (unaligned.num_ranges, unaligned.fixed_overhead_blocks) == (132, 2)


@pytest.mark.parametrize(
    "q_lens", [(-1, 3, 1), (2, -1, 2), (1, 1, -2)], ids=["first", "second", "last"]
)
def test_a_batch_of_decreasing_offsets_has_no_work(
    scheduler: TileScheduler, q_lens: tuple[int, ...]
) -> None:
    """Sequences of it could share query tokens, and exceed the work that the host expects."""
    ends = ints((5, 5 + q_lens[0], 5 + sum(q_lens[:2]), 5 + sum(q_lens)))
    batch = Batch((Seq(300), Seq(100, 2), Seq(200)))
    assert not schedule_of(scheduler, batch, cu_seqlens_q=ends, tokens=9, total_rows=900).work_items


@pytest.mark.parametrize("ends", [(0, 2, 2000), (-1, 2, 4)])
def test_query_tokens_outside_of_the_tensor_have_no_work(
    scheduler: TileScheduler, ends: tuple[int, ...]
) -> None:
    """Only the sequences whose query tokens exist are computed."""
    batch = Batch((Seq(300, 2), Seq(100, 3)))
    work_items = schedule_of(
        scheduler, batch, cu_seqlens_q=ints(ends), tokens=5, total_rows=80
    ).work_items
    assert {work.seq_idx for work in work_items} == {0 if ends[0] == 0 else 1}


@pytest.mark.parametrize("name", MLA)
@pytest.mark.parametrize("lens", [(300, 20, 9000, 0), (640,) * 9], ids=["mixed", "uniform"])
def test_cached_metadata_equals_recomputed(
    name: str, lens: tuple[int, ...], compiled: Compiled
) -> None:
    """It is used while schedule id and lengths are equal, and recomputed otherwise."""
    scheduler = compiled(name)
    batch = Batch(tuple(map(Seq, lens)), 16, 20)
    moved = replace(batch, seqs=(*batch.seqs[1:], Seq(lens[0] + 64)))
    memory = ints([0] * 8192)
    first_word = -ctypes.addressof(memory) % 128 // 4
    where = ctypes.addressof(memory) + 4 * first_word
    computed = schedule_of(scheduler, batch).work_items

    def cached(one: Batch, schedule_id: int) -> list[WorkItem]:
        return schedule_of(scheduler, one, semaphores=where, schedule_id=schedule_id).work_items

    assert cached(batch, 7) == computed
    assert cached(batch, 7) == computed
    assert cached(moved, 7) == schedule_of(scheduler, moved).work_items
    assert cached(batch, 7) == computed
    spec = scheduler.spec
    assert isinstance(spec, MlaSm90Spec)
    meta_words = spec.sched_meta_bytes // 4
    first_meta = first_word + spec.semaphore_bytes // 4 + 2 + spec.cached_seq_lens
    for cta in range(20):
        memory[first_meta + cta * meta_words + SEQ_WORD] = -1  # no work
    assert not cached(batch, 7)
    assert cached(batch, 8) == computed
