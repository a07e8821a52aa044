// Stream-K schedule: divides the KV blocks of all sequences evenly among CTA groups. Each CTA
// computes its own range.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "cu_seqlens.cuh"
#include "ptx/ld.cuh"
#include "seq_info.cuh"

// A CTA group is a set of consecutive CTAs that read the same tokens at the same time and share
// them through L2: each CTA for its own kv heads, which are adjacent in most caches, or for another
// row tile of the same heads. The KV blocks of all work tiles form one linear index space, of which
// every group takes an equal contiguous range. A work tile that crosses range boundaries is split,
// and its splits are combined. The host guarantees that total_blocks * num_ranges fits into 32
// bits.
struct ScheduleRange {
  u32 total_blocks;  // linear KV blocks of all work tiles
  u32 num_ranges;  // at most one per CTA group
  u32 index;  // of this range
  u32 begin;  // linear KV blocks
  u32 end;
  u32 rank_in_group;  // of this CTA
};

// Current work tile of a CTA.
struct SchedulerState {
  SeqInfo seq_info;
  int seq_idx;
  int tile;  // of the sequence
  u32 tile_begin;  // linear KV block
};

__device__ inline u32 range_begin_of(u32 index, u32 total_blocks, u32 num_ranges) {
  return index * total_blocks / num_ranges;
}

// Range that holds a linear KV block.
__device__ inline u32 range_of(u32 linear_block_idx, const ScheduleRange& range) {
  return ((linear_block_idx + 1) * range.num_ranges - 1) / range.total_blocks;
}

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
__device__ inline u32 uniform_kv_blocks(const Params& params, LaneSeqLens seq_lens, int first,
                                        int end) {
  SeqInfo seq_info;
  seq_info.q_len = params.q_len;
  seq_info.num_tiles = params.num_tiles;
  u32 sum = 0;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int i = 0; i < kSeqsPerLane; ++i) {
      set_kv_blocks(params, seq_info, seq_lens.lens[i]);
      sum += first + i < end ? linear_kv_blocks(seq_info) : 0;
    }
    first += kSeqsPerLane;
    if (first >= end) return sum;
    seq_lens = LaneSeqLens(params, first);
  }
}

// The same for ragged q_len; also reports a sequence that ends before it begins.
__device__ inline u32 ragged_kv_blocks(const Params& params, int first, int end,
                                       bool& any_negative_q_len) {
  u32 sum = 0;
#pragma unroll 1
  for (; first < end; ++first) {
    sum += linear_kv_blocks(seq_info_of(params, first, params.seq_lens[first]));
    any_negative_q_len |= has_negative_q_len(params, first);
  }
  return sum;
}

// Computes the range of this CTA's group and the work tile that it begins in, by a warp-wide prefix
// sum. Returns whether there is a range. `seq_lens` comes from lane_seq_lens.
__device__ inline bool find_range(const Params& params, const LaneSeqLens& seq_lens,
                                  ScheduleRange& range, SchedulerState& state) {
  const int per_lane = seqs_per_lane(params);
  const int first = min(lane_index() * per_lane, params.num_seqs);
  const int end = min(first + per_lane, params.num_seqs);
  u32 lane_blocks = 0;
  bool is_invalid = false;
  if (params.cu_seqlens_q == nullptr) {
    lane_blocks = uniform_kv_blocks(params, seq_lens, first, end);
  } else {
    lane_blocks = ragged_kv_blocks(params, first, end, is_invalid);
  }
  if (__any_sync(~0u, is_invalid)) return false;
  u32 inclusive_sum = lane_blocks;  // over lanes
#pragma unroll
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const u32 before = __shfl_up_sync(~0u, inclusive_sum, lanes);
    if (lane_index() >= lanes) inclusive_sum += before;
  }
  range.total_blocks = __shfl_sync(~0u, inclusive_sum, kWarpLanes - 1);
  range.num_ranges = min(static_cast<u32>(params.num_cta_groups), range.total_blocks);
  range.index = blockIdx.x / params.cta_group_size;
  range.rank_in_group = blockIdx.x - range.index * params.cta_group_size;
  if (range.index >= range.num_ranges) return false;
  range.begin = range_begin_of(range.index, range.total_blocks, range.num_ranges);
  range.end = range_begin_of(range.index + 1, range.total_blocks, range.num_ranges);

  const int lane = __ffs(static_cast<int>(__ballot_sync(~0u, inclusive_sum > range.begin))) - 1;
  u32 begin = __shfl_sync(~0u, inclusive_sum - lane_blocks, lane);
  state.seq_idx = lane * per_lane;
#pragma unroll 1
  while (true) {
    const int kv_len = per_lane <= kSeqsPerLane
                           ? seq_lens.of_lane(state.seq_idx - lane * per_lane, lane)
                           : params.seq_lens[state.seq_idx];
    state.seq_info = seq_info_of(params, state.seq_idx, kv_len);
    const u32 seq_blocks = linear_kv_blocks(state.seq_info);
    if (range.begin - begin < seq_blocks) break;
    begin += seq_blocks;
    ++state.seq_idx;
  }
  const u32 blocks_per_tile = tile_kv_blocks(state.seq_info);
  const u32 tile = (range.begin - begin) / blocks_per_tile;
  state.tile = static_cast<int>(tile);
  state.tile_begin = begin + tile * blocks_per_tile;
  return true;
}
