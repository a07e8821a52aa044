"""The stream-K schedule of gqa_sm90 in Python, line by line.

It mirrors `schedule_range.cuh` and `tile_scheduler.cuh`, function by function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

WARP_LANES = 4  # fewer than a warp has, so that each lane takes several sequences


class SeqInfo(NamedTuple):
    """`SeqInfo`: the fields that the schedule depends on."""

    num_kv_blocks: int
    num_tiles: int


@dataclass(frozen=True)
class Params:
    """`Params`: the fields that the schedule depends on."""

    seqs: tuple[SeqInfo, ...]
    num_cta_groups: int


@dataclass(frozen=True, kw_only=True)
class ScheduleRange:
    """`ScheduleRange`."""

    total_blocks: int
    num_ranges: int
    index: int
    begin: int
    end: int


@dataclass
class SchedulerState:
    """`SchedulerState`."""

    seq_idx: int
    tile: int
    tile_begin: int


class WorkItem(NamedTuple):
    """`WorkItem`: the fields that the schedule determines, with the CTA group that computes it."""

    cta_group: int
    seq_idx: int
    tile: int
    first_kv_block: int
    end_kv_block: int
    num_splits: int
    split_idx: int
    first_range: int


def tile_kv_blocks(seq_info: SeqInfo) -> int:
    """Mirror `tile_kv_blocks`: the linear KV blocks of a work tile."""
    return max(seq_info.num_kv_blocks, 1)


def linear_kv_blocks(seq_info: SeqInfo) -> int:
    """Mirror `linear_kv_blocks`: the linear KV blocks of a sequence."""
    return seq_info.num_tiles * tile_kv_blocks(seq_info)


def range_begin_of(index: int, total_blocks: int, num_ranges: int) -> int:
    """Mirror `range_begin_of`: the first linear KV block of a range."""
    return index * total_blocks // num_ranges


def range_of(linear_block_idx: int, schedule_range: ScheduleRange) -> int:
    """Mirror `range_of`: the range that holds a linear KV block."""
    return ((linear_block_idx + 1) * schedule_range.num_ranges - 1) // schedule_range.total_blocks


def find_range(params: Params, cta_group: int) -> tuple[ScheduleRange, SchedulerState] | None:
    """Mirror `find_range`: the range of a CTA group and the work tile that it begins in."""
    per_lane = -(-len(params.seqs) // WARP_LANES)
    lane_blocks = [
        sum(map(linear_kv_blocks, params.seqs[lane * per_lane : (lane + 1) * per_lane]))
        for lane in range(WARP_LANES)
    ]
    inclusive_sum = [sum(lane_blocks[: lane + 1]) for lane in range(WARP_LANES)]
    total_blocks = inclusive_sum[-1]
    num_ranges = min(params.num_cta_groups, total_blocks)
    if cta_group >= num_ranges:
        return None
    schedule_range = ScheduleRange(
        total_blocks=total_blocks,
        num_ranges=num_ranges,
        index=cta_group,
        begin=range_begin_of(cta_group, total_blocks, num_ranges),
        end=range_begin_of(cta_group + 1, total_blocks, num_ranges),
    )
    lane = next(lane for lane in range(WARP_LANES) if inclusive_sum[lane] > schedule_range.begin)
    begin = inclusive_sum[lane] - lane_blocks[lane]
    seq_idx = lane * per_lane
    while schedule_range.begin - begin >= linear_kv_blocks(params.seqs[seq_idx]):
        begin += linear_kv_blocks(params.seqs[seq_idx])
        seq_idx += 1
    blocks_per_tile = tile_kv_blocks(params.seqs[seq_idx])
    tile = (schedule_range.begin - begin) // blocks_per_tile
    return schedule_range, SchedulerState(seq_idx, tile, begin + tile * blocks_per_tile)


def work_at(params: Params, schedule_range: ScheduleRange, state: SchedulerState) -> WorkItem:
    """Mirror `work_at`: the work item of the current work tile."""
    seq_info = params.seqs[state.seq_idx]
    tile_end = state.tile_begin + tile_kv_blocks(seq_info)
    begin = max(schedule_range.begin, state.tile_begin) - state.tile_begin
    end = min(schedule_range.end, tile_end) - state.tile_begin
    num_splits, split_idx, first_range = 1, 0, schedule_range.index
    if begin > 0 or state.tile_begin + end < tile_end:
        first_range = range_of(state.tile_begin, schedule_range)
        num_splits = range_of(tile_end - 1, schedule_range) - first_range + 1
        split_idx = schedule_range.index - first_range
    return WorkItem(
        cta_group=schedule_range.index,
        seq_idx=state.seq_idx,
        tile=state.tile,
        first_kv_block=begin,
        end_kv_block=min(end, seq_info.num_kv_blocks),
        num_splits=num_splits,
        split_idx=split_idx,
        first_range=first_range,
    )


def next_work(params: Params, schedule_range: ScheduleRange, state: SchedulerState) -> bool:
    """Mirror `next_work`: advance, and return whether the work tile begins within the range."""
    state.tile_begin += tile_kv_blocks(params.seqs[state.seq_idx])
    if state.tile_begin >= schedule_range.end:
        return False
    state.tile += 1
    if state.tile < params.seqs[state.seq_idx].num_tiles:
        return True
    state.tile = 0
    state.seq_idx += 1
    while params.seqs[state.seq_idx].num_tiles == 0:
        state.seq_idx += 1
    return True


def work_items_of(params: Params, cta_group: int) -> Iterator[WorkItem]:
    """Yield the work items of a CTA of a group, in order, as `scheduler_loop` publishes them."""
    found = find_range(params, cta_group)
    if found is None:
        return
    schedule_range, state = found
    yield work_at(params, schedule_range, state)
    while next_work(params, schedule_range, state):
        yield work_at(params, schedule_range, state)
