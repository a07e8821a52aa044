// Scheduler warp: finds the range of its CTA, computes the work items in it, and publishes them
// ahead of the other warps.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/load.cuh"
#include "scheduler/schedule_range.cuh"
#include "seq_info.cuh"
#include "shared_memory.cuh"
#include "work_item.cuh"

// Consecutive sequences whose lengths a lane loads together.
constexpr int kSeqsPerLane = 4;

// Their lengths, from sequence `first` on; indices behind the last sequence repeat it.
struct LaneSeqLens {
  int lens[kSeqsPerLane];

  __device__ LaneSeqLens(const Params& params, int first) {
#pragma unroll
    for (int i = 0; i < kSeqsPerLane; ++i) {
      lens[i] = load_seq_len(params, min(first + i, params.num_seqs - 1),
                             [](const int* seq_len) { return ld_relaxed_gpu(seq_len); });
    }
  }

  __device__ bool differs_from(const LaneSeqLens& other) const {
    bool differ = false;
#pragma unroll
    for (int i = 0; i < kSeqsPerLane; ++i) differ |= lens[i] != other.lens[i];
    return differ;
  }

  // Length of sequence `index` of lane `lane`.
  __device__ int of_lane(int index, int lane) const {
    int seq_len = lens[0];
#pragma unroll
    for (int i = 1; i < kSeqsPerLane; ++i) seq_len = i == index ? lens[i] : seq_len;
    return __shfl_sync(~0u, seq_len, lane);
  }
};

__device__ inline int seqs_per_lane(const Params& params) {
  return ceil_div(params.num_seqs, kWarpLanes);
}

// Lengths of the first sequences of this lane.
__device__ inline LaneSeqLens lane_seq_lens(const Params& params) {
  return LaneSeqLens(params, lane_index() * seqs_per_lane(params));
}

// KV blocks of the sequences of a lane.
struct LaneBlocks {
  int linear_blocks = 0;
  int blocks_per_tile = 0;  // of the last work tile; 0 without any
  bool has_equal_tiles = true;

  __device__ void add(const SeqInfo& seq_info) {
    const int blocks = tile_kv_blocks(seq_info, kFixedOverheadBlocks);
    linear_blocks += seq_info.num_tiles * blocks;
    has_equal_tiles &= blocks_per_tile == 0 || blocks_per_tile == blocks;
    blocks_per_tile = blocks;
  }
};

// Of the sequences [first, end), which all have the same q_len.
__device__ inline LaneBlocks uniform_kv_blocks(const Params& params, LaneSeqLens seq_lens,
                                               int first, int end) {
  SeqInfo seq_info;
  seq_info.q_len = kIsSparse ? 1 : params.q_len;
  seq_info.num_tiles = params.num_tiles;
  LaneBlocks blocks;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int i = 0; i < kSeqsPerLane; ++i) {
      set_kv_blocks(params, seq_info, seq_lens.lens[i]);
      if (first + i < end) blocks.add(seq_info);
    }
    first += kSeqsPerLane;
    if (first >= end) return blocks;
    seq_lens = LaneSeqLens(params, first);
  }
}

// The same for ragged q_len; also reports a sequence that ends before it begins.
__device__ inline LaneBlocks ragged_kv_blocks(const Params& params, int first, int end,
                                              bool& any_negative_q_len) {
  LaneBlocks blocks;
#pragma unroll 1
  for (; first < end; ++first) {
    const SeqInfo seq_info = seq_info_of(params, first, params.seq_lens[first]);
    blocks.add(seq_info);
    any_negative_q_len |= has_negative_q_len(params, first);
  }
  return blocks;
}

// Rounds a range up to whole work tiles if all tiles have as many KV blocks, so that none is split.
__device__ inline void align_with_tiles(const LaneBlocks& lane_blocks, ScheduleRange& range) {
  // Unsigned: a sum of two numbers of blocks may exceed int32.
  const u32 blocks = __reduce_max_sync(~0u, static_cast<u32>(lane_blocks.blocks_per_tile));
  const bool is_equal =
      lane_blocks.blocks_per_tile == 0 || lane_blocks.blocks_per_tile == static_cast<int>(blocks);
  if (!__all_sync(~0u, lane_blocks.has_equal_tiles && is_equal)) return;
  range.begin = static_cast<int>((range.begin + blocks - 1) / blocks * blocks);
  range.end = static_cast<int>((range.end + blocks - 1) / blocks * blocks);
}

// Where the range of a call over blocks begins: all sequences have as many KV blocks.
__device__ inline bool find_range_of_equal(const Params& params, int cta_group,
                                           ScheduleRange& range, WorkState& state) {
  state.seq_info = seq_info_of(params, 0, params.max_tokens);
  const int tile_blocks = tile_kv_blocks(state.seq_info, kFixedOverheadBlocks);
  const int num_tiles = state.seq_info.num_tiles;
  const int total_blocks = params.num_seqs * num_tiles * tile_blocks;
  const int num_ranges = min(params.num_cta_groups, total_blocks);
  if (cta_group >= num_ranges) return false;
  range = range_at(cta_group, num_ranges, total_blocks, kFixedOverheadBlocks);
  if (params.takes_whole_tiles) {
    range.begin = ceil_div(range.begin, tile_blocks) * tile_blocks;
    range.end = ceil_div(range.end, tile_blocks) * tile_blocks;
  }
  const u32 tile = static_cast<u32>(range.begin) / static_cast<u32>(tile_blocks);
  state.seq_idx = static_cast<int>(tile / static_cast<u32>(num_tiles));
  state.seq_info.first_query = state.seq_idx;
  state.tile = static_cast<int>(tile) - state.seq_idx * num_tiles;
  state.tile_begin = static_cast<int>(tile) * tile_blocks;
  if constexpr (kBatchInvariant) state.split = state.first_kv_block(range);
  return true;
}

// Computes the range of a CTA group and the work tile that it begins in, by a warp-wide prefix sum.
// Returns whether there is a range. `seq_lens` comes from lane_seq_lens. Unlike the sum over a
// whole CTA in scheduler/find_range.cuh it needs no other warp, and starts before the preceding
// kernel completes.
__device__ inline bool find_range(const Params& params, int cta_group, const LaneSeqLens& seq_lens,
                                  ScheduleRange& range, WorkState& state) {
  if constexpr (kHasEqualSeqs) return find_range_of_equal(params, cta_group, range, state);
  const int per_lane = seqs_per_lane(params);
  const int first = min(lane_index() * per_lane, params.num_seqs);
  const int end = min(first + per_lane, params.num_seqs);
  LaneBlocks lane_blocks;
  bool is_invalid = false;
  if (!has_ragged_queries(params)) {
    lane_blocks = uniform_kv_blocks(params, seq_lens, first, end);
  } else {
    lane_blocks = ragged_kv_blocks(params, first, end, is_invalid);
  }
  if (__any_sync(~0u, is_invalid)) return false;
  const int inclusive_sum = inclusive_sum_of_lanes(lane_blocks.linear_blocks);
  const int total_blocks = __shfl_sync(~0u, inclusive_sum, kWarpLanes - 1);
  const int num_ranges = min(params.num_cta_groups, total_blocks);
  if (cta_group >= num_ranges) return false;
  range = range_at(cta_group, num_ranges, total_blocks, kFixedOverheadBlocks);
  if (params.takes_whole_tiles) align_with_tiles(lane_blocks, range);

  const int lane = __ffs(static_cast<int>(__ballot_sync(~0u, inclusive_sum > range.begin))) - 1;
  int begin = __shfl_sync(~0u, inclusive_sum - lane_blocks.linear_blocks, lane);
  state.seq_idx = lane * per_lane;
#pragma unroll 1
  while (true) {
    const int kv_len = per_lane <= kSeqsPerLane
                           ? seq_lens.of_lane(state.seq_idx - lane * per_lane, lane)
                           : seq_len_of(params, state.seq_idx);
    state.seq_info = seq_info_of(params, state.seq_idx, kv_len);
    const int seq_blocks = linear_kv_blocks(state.seq_info, kFixedOverheadBlocks);
    if (range.begin - begin < seq_blocks) break;
    begin += seq_blocks;
    ++state.seq_idx;
  }
  const int blocks_per_tile = tile_kv_blocks(state.seq_info, kFixedOverheadBlocks);
  state.tile = static_cast<int>(static_cast<u32>(range.begin - begin) / blocks_per_tile);
  state.tile_begin = begin + state.tile * blocks_per_tile;
  if constexpr (kBatchInvariant) state.split = state.first_kv_block(range);
  return true;
}

// Whether the first work item may be computed before the preceding kernel completes (PDL): then its
// inputs are few enough to be loaded once more and compared. With DCP they include more lengths.
__device__ inline bool schedules_before_pdl_wait(const Params& params) {
  if constexpr (kHasEqualSeqs) return true;
  return !kHasDcp && !has_ragged_queries(params) && seqs_per_lane(params) <= kSeqsPerLane;
}

// Lets the other warps load the first page ids and the first Q of the work item that is written.
// After pdl_wait it loads seq_lens again and returns whether they are unchanged; otherwise all
// warps start over.
__device__ inline bool publish_first_work(const Params& params, LaneSeqLens& seq_lens,
                                          SharedMemoryPlan& smem) {
  named_barrier_sync(NamedBarrier::FirstWorkReady, kThreads);
  pdl_wait();
  const LaneSeqLens current = lane_seq_lens(params);
  const bool is_valid = !__any_sync(~0u, current.differs_from(seq_lens));
  if (lane_index() == 0) smem.is_first_work_valid = is_valid;
  __syncwarp();
  if (is_valid) {
    named_barrier_arrive(NamedBarrier::FirstWorkChecked, kThreads);
  } else {
    // No warp reads the first item any more.
    named_barrier_sync(NamedBarrier::FirstWorkChecked, kThreads);
    seq_lens = current;
  }
  return is_valid;
}

// Starts before the preceding kernel completes. One loop for the first work item and the others
// keeps the code short.
__device__ inline void scheduler_loop(const Params& params, SharedMemoryPlan& smem) {
  if (!schedules_before_pdl_wait(params)) pdl_wait();
  const int cta = static_cast<int>(blockIdx.x);
  const int cta_group = cta / params.cta_group_size;
  const int rank_in_group = cta - cta_group * params.cta_group_size;
  LaneSeqLens seq_lens = lane_seq_lens(params);
  ScheduleRange range;
  WorkState state;
  bool has_work = true;
#pragma unroll 1
  for (u32 work_idx = 0; has_work;) {
    has_work = work_idx == 0 ? find_range(params, cta_group, seq_lens, range, state)
                             : state.advance(params, range);
    const WorkItem work =
        has_work ? work_at(params, range, rank_in_group, state) : WorkItem::none();
    if (work_idx > 0) smem.work_pipeline.wait_empty(work_idx);
    if (kBatchInvariant && work_idx == 0 && has_work && lane_index() == 0) smem.range = range;
    smem.work_pipeline.write(work_idx, work);
    if (work_idx == 0 && !publish_first_work(params, seq_lens, smem)) {
      has_work = true;
      continue;
    }
    smem.work_pipeline.publish(work_idx++);
  }
}
