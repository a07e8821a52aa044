// Range of a CTA, found by all of its threads.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/list_tiles.cuh"
#include "scheduler/phases.cuh"
#include "scheduler/schedule_range.cuh"
#include "seq_info.cuh"

// Whether `a` is a multiple of `b`; may return false for numbers that a float does not represent.
__device__ inline bool is_multiple(int a, int b) {
  return __float2int_rn(__fdividef(static_cast<float>(a), static_cast<float>(b))) * b == a;
}

// The largest number of ranges aligned with work tiles of `num_kv_blocks` KV blocks each: every
// range has the same number of whole tiles, or every tile the same number of whole ranges. 0 if the
// CTA groups that would be idle cost more than the split overhead. Called by whole warps.
__device__ inline int aligned_ranges(int num_cta_groups, int num_tiles, int num_kv_blocks) {
  const int total_blocks = num_tiles * num_kv_blocks;
  num_cta_groups = min(num_cta_groups, total_blocks);  // every range has a KV block
  const int num_ranges = max(num_cta_groups - lane_index(), 1);
  const bool is_aligned = is_multiple(num_tiles, num_ranges) || is_multiple(num_ranges, num_tiles);
  const bool is_cheap =
      static_cast<i64>(total_blocks) * num_cta_groups <=
      (total_blocks + static_cast<i64>(kSplitOverheadBlocks) * num_cta_groups) * num_ranges;
  const u32 found = __ballot_sync(~0u, is_aligned && is_cheap);
  return found == 0 ? 0 : max(num_cta_groups - __ffs(static_cast<int>(found)) + 1, 1);
}

// The sequences whose KV blocks a thread counts. A thread past the last sequence reads that one,
// and counts nothing.
__device__ inline int seqs_per_thread(const Params& params) {
  return ceil_div(params.num_seqs, kThreads);
}

__device__ inline int first_seq_of_thread(const Params& params) {
  const int first = static_cast<int>(threadIdx.x) * seqs_per_thread(params);
  return min(first, params.num_seqs - 1);
}

// Called by all threads. Stores the range of `cta_group` in `scheduler_storage` and returns whether
// it has one. A prefix sum over the sequences gives each thread the linear block indices of its
// sequences; the thread that holds the range's first block stores it. `seq_len` is
// seq_len_of(first_seq_of_thread).
__device__ inline bool find_range(const Params& params, int cta_group, int seq_len,
                                  SchedulerStorage& scheduler_storage) {
  const int per_thread = seqs_per_thread(params);
  const int first = static_cast<int>(threadIdx.x) * per_thread;
  const int last = min(first + per_thread, params.num_seqs);
  const int end = first_seq_of_thread(params);
  SeqInfo seq_info;  // of the thread's first sequence after the loop, which runs backwards
  int num_kv_blocks = 0;
  int num_tiles = 0;
  int own_blocks = 0;
  int own_slots = 0;
  bool is_uniform = true;
  bool is_invalid = false;
#pragma unroll 1
  for (int seq_idx = last - 1; seq_idx >= end; --seq_idx) {
    seq_info = seq_info_of(params, seq_idx, seq_idx == end ? seq_len : seq_len_of(params, seq_idx));
    is_uniform &= seq_idx == last - 1 ||
                  (seq_info.num_kv_blocks == num_kv_blocks && seq_info.num_tiles == num_tiles);
    is_invalid |= seq_info.q_len < 0;
    num_kv_blocks = seq_info.num_kv_blocks;
    num_tiles = seq_info.num_tiles;
    own_blocks += linear_kv_blocks(seq_info, kFixedOverheadBlocks);
    if constexpr (kBatchInvariant) own_slots += slots_of(seq_info);
  }
  if (first >= last) own_blocks = own_slots = 0;
  // Shuffles need all lanes: no short-circuit evaluation.
  const int lane_0_blocks = __shfl_sync(~0u, num_kv_blocks, 0);
  const int lane_0_tiles = __shfl_sync(~0u, num_tiles, 0);
  is_uniform =
      __all_sync(~0u, is_uniform && num_kv_blocks == lane_0_blocks && num_tiles == lane_0_tiles);
  is_invalid = __any_sync(~0u, is_invalid);
  const int inclusive_sum = inclusive_sum_of_lanes(own_blocks);
  int slots_before = 0;
  if constexpr (kBatchInvariant) {
    // Ranges are not aligned with work tiles, and the sum of slots takes the place of their number.
    is_uniform = false;
    slots_before = inclusive_sum_of_lanes(own_slots);
    num_tiles = slots_before;
    slots_before -= own_slots;
  }
  if (lane_index() == kWarpLanes - 1) {
    const SeqLengths kind = is_uniform ? SeqLengths::kUniform : SeqLengths::kMixed;
    scheduler_storage.warp_seqs[warp_index()] = {inclusive_sum, num_kv_blocks, num_tiles,
                                                 is_invalid ? SeqLengths::kInvalid : kind};
  }
  __syncthreads();
  // Each lane reads the result of one warp; there are fewer warps than lanes.
  constexpr int kWarps = kThreads / kWarpLanes;
  const WarpSeqs found = scheduler_storage.warp_seqs[min(lane_index(), kWarps - 1)];
  const int warp_blocks = lane_index() < kWarps ? found.linear_blocks : 0;
  int total_blocks = __reduce_add_sync(~0u, warp_blocks);
  int begin = __reduce_add_sync(~0u, lane_index() < warp_index() ? warp_blocks : 0);
  begin += inclusive_sum - own_blocks;
  if constexpr (kBatchInvariant) {
    slots_before += __reduce_add_sync(~0u, lane_index() < warp_index() ? found.num_tiles : 0);
  }
  num_kv_blocks = __shfl_sync(~0u, found.num_kv_blocks, 0);
  num_tiles = __shfl_sync(~0u, found.num_tiles, 0);
  if (__any_sync(~0u, found.kind == SeqLengths::kInvalid)) return false;
  is_uniform =
      __all_sync(~0u, found.kind == SeqLengths::kUniform && found.num_kv_blocks == num_kv_blocks &&
                          found.num_tiles == num_tiles && num_kv_blocks > 0 && num_tiles > 0);
  int num_ranges =
      max(1, min(min(params.num_cta_groups, kMaxRanges), total_blocks / kMinBlocksPerRange));
  int fixed_overhead_blocks = kFixedOverheadBlocks;
  if constexpr (kBatchInvariant) {
    const int num_slots = __reduce_add_sync(~0u, lane_index() < kWarps ? found.num_tiles : 0);
    if (num_slots > num_slots_of(params)) {
      if (threadIdx.x == 0) {
        static_cast<ScheduleRange&>(scheduler_storage.range) =
            range_before_phases(total_blocks, num_ranges, num_ranges - 1 - cta_group);
        scheduler_storage.range.clear_list();
        scheduler_storage.initial_state = {seq_info, 0, 0, 0};
      }
      __syncthreads();
      return true;
    }
    if (per_thread == 1) {
      seq_info.set_first_slot(slots_before);
      const int num_listed = list_tiles(params, cta_group, num_ranges, num_slots, seq_info,
                                        scheduler_storage, scheduler_storage.range);
      if (num_listed >= 0) return num_listed > 0;
    }
  }
  if (is_uniform) {
    const int aligned = aligned_ranges(num_ranges, params.num_seqs * num_tiles, num_kv_blocks);
    if (aligned > 0) {
      num_ranges = aligned;
      fixed_overhead_blocks = 0;
      const int seq_blocks = num_tiles * num_kv_blocks;
      total_blocks = params.num_seqs * seq_blocks;
      begin = min(first, params.num_seqs) * seq_blocks;
      own_blocks = max(last - first, 0) * seq_blocks;
    }
  }
  const int index = num_ranges - 1 - cta_group;
  if (index < 0 || total_blocks == 0) return false;
  const ScheduleRange range = range_at(index, num_ranges, total_blocks, fixed_overhead_blocks);
  if (begin <= range.begin && range.begin < begin + own_blocks) {
    const int blocks_per_tile = seq_info.num_kv_blocks + fixed_overhead_blocks;
    // The range may begin in a later sequence of the thread; the scheduler advances to it.
    int tile = 0;
    if (seq_info.num_tiles != 1) {
      tile = min(static_cast<int>(static_cast<u32>(range.begin - begin) / blocks_per_tile),
                 seq_info.num_tiles - 1);
    }
    seq_info.set_first_slot(slots_before);
    static_cast<ScheduleRange&>(scheduler_storage.range) = range;
    scheduler_storage.range.clear_list();
    scheduler_storage.initial_state = {seq_info, first, tile, begin + tile * blocks_per_tile};
  }
  __syncthreads();
  return true;
}
