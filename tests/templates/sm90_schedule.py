"""The stream-K schedule of the sm90 MLA kernels in Python: schedule_range and tile_scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mlagen.spec.mla.sm90 import MlaSm90Spec
from tests.kernels import mla_sm90

FIXED_OVERHEAD_BLOCKS = tuple(mla_sm90(rows=rows).fixed_overhead_blocks for rows in (16, 64))
SPLIT_OVERHEAD_BLOCKS = MlaSm90Spec.split_overhead_blocks
MIN_BLOCKS_PER_RANGE = MlaSm90Spec.min_blocks_per_range
MAX_RANGES = MlaSm90Spec.max_ranges
WARP_LANES = 32
THREADS = 8  # per CTA; fewer than the kernel has, so that a thread has several sequences


@dataclass(frozen=True)
class Params:
    """What the schedule depends on."""

    kv_blocks: tuple[int, ...]  # of each sequence
    m_tiles: tuple[int, ...]  # row tiles of each sequence
    num_cta_groups: int
    cta_group_size: int
    fixed_overhead_blocks: int = FIXED_OVERHEAD_BLOCKS[0]

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return len(self.kv_blocks)


class SeqInfo(NamedTuple):
    """SeqInfo."""

    m_tiles: int
    num_kv_blocks: int
    num_m_groups: int


@dataclass(frozen=True, kw_only=True)
class ScheduleRange:
    """ScheduleRange, and the SchedulerState that it begins with."""

    total_blocks: int
    num_ranges: int
    index: int
    fixed_overhead_blocks: int
    begin: int
    end: int
    seq_idx: int
    m_group: int
    tile_begin: int


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """WorkItem, with its CTA and its index among the work items of that CTA."""

    seq_idx: int
    m_tile: int
    first_kv_block: int
    end_kv_block: int
    num_splits: int
    num_reducers: int
    split_idx: int
    first_split_cta: int
    cta: int
    work_idx: int


def ceil_div(a: int, b: int) -> int:
    """Round the quotient up."""
    return -(-a // b)


def seq_info_of(params: Params, seq_idx: int) -> SeqInfo:
    """seq_info_of."""
    num_m_groups = ceil_div(params.m_tiles[seq_idx], params.cta_group_size)
    return SeqInfo(params.m_tiles[seq_idx], params.kv_blocks[seq_idx], num_m_groups)


def linear_kv_blocks(seq_info: SeqInfo, fixed_overhead_blocks: int) -> int:
    """linear_kv_blocks."""
    return seq_info.num_m_groups * (seq_info.num_kv_blocks + fixed_overhead_blocks)


def aligned_ranges(num_cta_groups: int, num_tiles: int, num_kv_blocks: int) -> int:
    """aligned_ranges, with its lanes one after the other."""
    total_blocks = num_tiles * num_kv_blocks
    num_cta_groups = min(num_cta_groups, total_blocks)
    for lane in range(WARP_LANES):
        num_ranges = max(num_cta_groups - lane, 1)
        is_aligned = num_tiles % num_ranges == 0 or num_ranges % num_tiles == 0
        is_cheap = (
            total_blocks * num_cta_groups
            <= (total_blocks + SPLIT_OVERHEAD_BLOCKS * num_cta_groups) * num_ranges
        )
        if is_aligned and is_cheap:
            return max(num_cta_groups - (lane + 1) + 1, 1)
    return 0


def range_begin_of(index: int, quotient: int, remainder: int, num_ranges: int) -> int:
    """range_begin_of."""
    return index * quotient + index * remainder // num_ranges


def find_range(params: Params, cta_group: int) -> ScheduleRange | None:
    """find_range, with its threads one after the other."""
    per_thread = ceil_div(params.num_seqs, THREADS)
    firsts = [thread * per_thread for thread in range(THREADS)]
    lasts = [min(first + per_thread, params.num_seqs) for first in firsts]
    own_blocks = [0] * THREADS
    kinds = set()  # KV blocks and row-tile groups of a sequence
    for thread in range(THREADS):
        for seq_idx in range(firsts[thread], lasts[thread]):
            seq_info = seq_info_of(params, seq_idx)
            kinds.add((seq_info.num_kv_blocks, seq_info.num_m_groups))
            own_blocks[thread] += linear_kv_blocks(seq_info, params.fixed_overhead_blocks)
    begins = [sum(own_blocks[:thread]) for thread in range(THREADS)]
    total_blocks = sum(own_blocks)
    num_kv_blocks, num_m_groups = min(kinds)
    is_uniform = num_kv_blocks > 0 and num_m_groups > 0 and len(kinds) == 1
    num_ranges = max(
        1, min(params.num_cta_groups, MAX_RANGES, total_blocks // MIN_BLOCKS_PER_RANGE)
    )
    fixed_overhead_blocks = params.fixed_overhead_blocks
    if is_uniform:
        aligned = aligned_ranges(num_ranges, params.num_seqs * num_m_groups, num_kv_blocks)
        if aligned > 0:
            num_ranges = aligned
            fixed_overhead_blocks = 0
            seq_blocks = num_m_groups * num_kv_blocks
            total_blocks = params.num_seqs * seq_blocks
            begins = [min(first, params.num_seqs) * seq_blocks for first in firsts]
            own_blocks = [
                max(last - first, 0) * seq_blocks for first, last in zip(firsts, lasts, strict=True)
            ]
    index = num_ranges - 1 - cta_group
    if index < 0 or total_blocks == 0:
        return None
    quotient, remainder = divmod(total_blocks, num_ranges)
    range_begin = range_begin_of(index, quotient, remainder, num_ranges)
    range_end = range_begin_of(index + 1, quotient, remainder, num_ranges)
    found = []
    for thread in range(THREADS):
        begin = begins[thread]
        if begin <= range_begin < begin + own_blocks[thread]:
            seq_idx = firsts[thread]
            seq_info = seq_info_of(params, seq_idx)
            while range_begin >= begin + linear_kv_blocks(seq_info, fixed_overhead_blocks):
                begin += linear_kv_blocks(seq_info, fixed_overhead_blocks)
                seq_idx += 1
                seq_info = seq_info_of(params, seq_idx)
            blocks_per_tile = seq_info.num_kv_blocks + fixed_overhead_blocks
            m_group = (range_begin - begin) // blocks_per_tile
            found.append(
                ScheduleRange(
                    total_blocks=total_blocks,
                    num_ranges=num_ranges,
                    index=index,
                    fixed_overhead_blocks=fixed_overhead_blocks,
                    begin=range_begin,
                    end=range_end,
                    seq_idx=seq_idx,
                    m_group=m_group,
                    tile_begin=begin + m_group * blocks_per_tile,
                )
            )
    (schedule_range,) = found  # one thread stores it
    return schedule_range


def kv_block_in_tile(linear_block_idx: int, tile_begin: int, schedule_range: ScheduleRange) -> int:
    """kv_block_in_tile."""
    return max(linear_block_idx - tile_begin - schedule_range.fixed_overhead_blocks, 0)


def first_range_from(linear_block_idx: int, schedule_range: ScheduleRange) -> int:
    """first_range_from."""
    return ceil_div(linear_block_idx * schedule_range.num_ranges, schedule_range.total_blocks)


def splits_of(
    tile_begin: int, num_kv_blocks: int, schedule_range: ScheduleRange
) -> tuple[int, int, bool]:
    """splits_of: num_splits, first_range and ends_at_range."""
    first_kv_block = tile_begin + schedule_range.fixed_overhead_blocks
    second_range = first_range_from(first_kv_block + 1, schedule_range)
    end = first_kv_block + num_kv_blocks
    end_range = first_range_from(end, schedule_range)
    ends_at_range = end_range * schedule_range.total_blocks < (end + 1) * schedule_range.num_ranges
    return 1 + end_range - second_range, second_range - 1, ends_at_range


def work_items_of(
    params: Params, schedule_range: ScheduleRange, rank_in_group: int
) -> Iterator[WorkItem]:
    """TileScheduler, from the first work item to the last."""
    seq_idx, m_group = schedule_range.seq_idx, schedule_range.m_group
    tile_begin = schedule_range.tile_begin
    seq_info = seq_info_of(params, seq_idx)
    work_idx = 0

    def cta_of_range(index: int) -> int:
        return (schedule_range.num_ranges - 1 - index) * params.cta_group_size + rank_in_group

    while seq_idx < params.num_seqs and tile_begin < schedule_range.end:
        num_kv_blocks = seq_info.num_kv_blocks
        tile_end = tile_begin + num_kv_blocks + schedule_range.fixed_overhead_blocks
        first, last = 0, num_kv_blocks
        if schedule_range.begin > tile_begin:
            first = kv_block_in_tile(schedule_range.begin, tile_begin, schedule_range)
        if schedule_range.end < tile_end:
            last = kv_block_in_tile(schedule_range.end, tile_begin, schedule_range)
        has_work = schedule_range.begin <= tile_begin if num_kv_blocks == 0 else first < last
        m_tile = m_group * params.cta_group_size + rank_in_group
        if has_work and m_tile < seq_info.m_tiles:
            num_splits, first_range, ends_at_range = 1, schedule_range.index, True
            if first > 0 or last < num_kv_blocks:
                num_splits, first_range, ends_at_range = splits_of(
                    tile_begin, num_kv_blocks, schedule_range
                )
            yield WorkItem(
                seq_idx=seq_idx,
                m_tile=m_tile,
                first_kv_block=first,
                end_kv_block=last,
                num_splits=num_splits,
                num_reducers=num_splits - (not ends_at_range),
                split_idx=0 if first == 0 else schedule_range.index - first_range,
                first_split_cta=cta_of_range(first_range),
                cta=cta_of_range(schedule_range.index),
                work_idx=work_idx,
            )
            work_idx += 1
        # advance
        tile_begin += num_kv_blocks + schedule_range.fixed_overhead_blocks
        m_group += 1
        if m_group < seq_info.num_m_groups:
            continue
        m_group = 0
        seq_idx += 1
        while seq_idx < params.num_seqs:
            seq_info = seq_info_of(params, seq_idx)
            if seq_info.num_m_groups:
                break
            seq_idx += 1


def all_work_items(params: Params) -> list[WorkItem]:
    """Return the work items of all CTAs."""
    ranges = [find_range(params, cta_group) for cta_group in range(params.num_cta_groups)]
    return [
        work
        for schedule_range in ranges
        if schedule_range is not None
        for rank_in_group in range(params.cta_group_size)
        for work in work_items_of(params, schedule_range, rank_in_group)
    ]
