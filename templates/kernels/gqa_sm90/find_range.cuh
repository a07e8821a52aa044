// Range of a CTA, found by its scheduler warp.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/ld.cuh"
#include "scheduler/schedule_range.cuh"
#include "seq_info.cuh"

// Consecutive sequences whose lengths a lane loads together.
constexpr int kSeqsPerLane = 4;

// Their lengths, from sequence `first` on; indices behind the last sequence repeat it.
struct LaneSeqLens {
  int lens[kSeqsPerLane];

  __device__ LaneSeqLens(const Params& params, int first) {
#pragma unroll
    for (int i = 0; i < kSeqsPerLane; ++i) {
      lens[i] = ld_relaxed_gpu(params.seq_lens + min(first + i, params.num_seqs - 1));
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

// Linear KV blocks of the sequences [first, end), which all have the same q_len.
__device__ inline int uniform_kv_blocks(const Params& params, LaneSeqLens seq_lens, int first,
                                        int end) {
  SeqInfo seq_info;
  seq_info.q_len = params.q_len;
  seq_info.num_tiles = params.num_tiles;
  int sum = 0;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int i = 0; i < kSeqsPerLane; ++i) {
      set_kv_blocks(params, seq_info, seq_lens.lens[i]);
      sum += first + i < end ? linear_kv_blocks(seq_info, kFixedOverheadBlocks) : 0;
    }
    first += kSeqsPerLane;
    if (first >= end) return sum;
    seq_lens = LaneSeqLens(params, first);
  }
}

// The same for ragged q_len; also reports a sequence that ends before it begins.
__device__ inline int ragged_kv_blocks(const Params& params, int first, int end,
                                       bool& any_negative_q_len) {
  int sum = 0;
#pragma unroll 1
  for (; first < end; ++first) {
    const SeqInfo seq_info = seq_info_of(params, first, params.seq_lens[first]);
    sum += linear_kv_blocks(seq_info, kFixedOverheadBlocks);
    any_negative_q_len |= has_negative_q_len(params, first);
  }
  return sum;
}

// Computes the range of a CTA group and the work tile that it begins in, by a warp-wide prefix sum.
// Returns whether there is a range. `seq_lens` comes from lane_seq_lens. Unlike the sum over a
// whole CTA in scheduler/find_range.cuh it needs no other warp, and starts before the preceding
// kernel completes.
__device__ inline bool find_range(const Params& params, int cta_group, const LaneSeqLens& seq_lens,
                                  ScheduleRange& range, SchedulerState& state) {
  const int per_lane = seqs_per_lane(params);
  const int first = min(lane_index() * per_lane, params.num_seqs);
  const int end = min(first + per_lane, params.num_seqs);
  int lane_blocks = 0;
  bool is_invalid = false;
  if (params.cu_seqlens_q == nullptr) {
    lane_blocks = uniform_kv_blocks(params, seq_lens, first, end);
  } else {
    lane_blocks = ragged_kv_blocks(params, first, end, is_invalid);
  }
  if (__any_sync(~0u, is_invalid)) return false;
  const int inclusive_sum = inclusive_sum_of_lanes(lane_blocks);
  const int total_blocks = __shfl_sync(~0u, inclusive_sum, kWarpLanes - 1);
  const int num_ranges = min(params.num_cta_groups, total_blocks);
  if (cta_group >= num_ranges) return false;
  range = range_at(cta_group, num_ranges, total_blocks, kFixedOverheadBlocks);

  const int lane = __ffs(static_cast<int>(__ballot_sync(~0u, inclusive_sum > range.begin))) - 1;
  int begin = __shfl_sync(~0u, inclusive_sum - lane_blocks, lane);
  state.seq_idx = lane * per_lane;
#pragma unroll 1
  while (true) {
    const int kv_len = per_lane <= kSeqsPerLane
                           ? seq_lens.of_lane(state.seq_idx - lane * per_lane, lane)
                           : params.seq_lens[state.seq_idx];
    state.seq_info = seq_info_of(params, state.seq_idx, kv_len);
    const int seq_blocks = linear_kv_blocks(state.seq_info, kFixedOverheadBlocks);
    if (range.begin - begin < seq_blocks) break;
    begin += seq_blocks;
    ++state.seq_idx;
  }
  const int blocks_per_tile = tile_kv_blocks(state.seq_info, kFixedOverheadBlocks);
  state.tile = static_cast<int>(static_cast<u32>(range.begin - begin) / blocks_per_tile);
  state.tile_begin = begin + state.tile * blocks_per_tile;
  return true;
}
