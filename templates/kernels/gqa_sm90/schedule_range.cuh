// How the work of a call is divided among the blocks of the grid: each finds its own part.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "cu_seqlens.cuh"
#include "ptx/ld.cuh"
#include "seq_info.cuh"

// A team is some blocks of the grid that are neighbours. They read the same tokens at the same
// time, each those of its kv heads, which lie side by side in most caches; or the very same, for
// another tile of rows. All units in a row make a line. Every team takes an equal stretch of it,
// its span; a unit that lies on several spans is computed in as many pieces, which are merged. The
// host sees to it that the length of the line times the number of spans fits into 32 bits.
struct ScheduleRange {
  u32 total_blocks;  // length of the line
  u32 num_ranges;  // in use
  u32 index;  // of this one
  u32 begin;  // positions on the line
  u32 end;
  u32 rank_in_group;  // of the team
};

// Where a walk along the units is.
struct SchedulerState {
  SeqInfo seq_info;
  int seq_idx;
  int tile;  // of the request
  u32 tile_begin;
};

__device__ inline u32 range_begin_of(u32 index, u32 total_blocks, u32 num_ranges) {
  return index * total_blocks / num_ranges;
}

// The span that a position lies on.
__device__ inline u32 range_of(u32 linear_block_idx, const ScheduleRange& range) {
  return ((linear_block_idx + 1) * range.num_ranges - 1) / range.total_blocks;
}

// Requests whose lengths a lane asks for together; neighbours, that it adds up.
constexpr int kSeqsPerLane = 4;

// The lengths of such requests, from `first` on; behind the last one that one's.
struct LaneSeqLens {
  int each[kSeqsPerLane];

  __device__ LaneSeqLens(const Params& params, int first) {
#pragma unroll
    for (int i = 0; i < kSeqsPerLane; ++i) {
      each[i] = ld_relaxed_gpu(params.seq_lens + min(first + i, params.num_seqs - 1));
    }
  }

  __device__ bool differs_from(const LaneSeqLens& other) const {
    bool differ = false;
#pragma unroll
    for (int i = 0; i < kSeqsPerLane; ++i) differ |= each[i] != other.each[i];
    return differ;
  }

  // The length of request `index` of these, of lane `lane`'s.
  __device__ int of_lane(int index, int lane) const {
    int seq_len = each[0];
#pragma unroll
    for (int i = 1; i < kSeqsPerLane; ++i) seq_len = i == index ? each[i] : seq_len;
    return __shfl_sync(~0u, seq_len, lane);
  }
};

__device__ inline int seqs_per_lane(const Params& params) {
  return ceil_div(params.num_seqs, kWarpLanes);
}

// What the lane has of the first of its requests.
__device__ inline LaneSeqLens lane_seq_lens(const Params& params) {
  return LaneSeqLens(params, lane_index() * seqs_per_lane(params));
}

// The positions on the line that requests from `first` to before `end` take, all of one q_len.
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
      set_kv_blocks(params, seq_info, seq_lens.each[i]);
      sum += first + i < end ? linear_kv_blocks(seq_info) : 0;
    }
    first += kSeqsPerLane;
    if (first >= end) return sum;
    seq_lens = LaneSeqLens(params, first);
  }
}

// The same where requests differ in their queries; finds out whether their offsets go back.
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

// Finds the span of this block's team and the unit that it begins in, by a whole warp; says whether
// there is one. `seq_lens` are the lane's lane_seq_lens.
__device__ inline bool find_range(const Params& params, const LaneSeqLens& seq_lens,
                                  ScheduleRange& range, SchedulerState& state) {
  const int per_lane = seqs_per_lane(params);
  const int first = min(lane_index() * per_lane, params.num_seqs);
  const int end = min(first + per_lane, params.num_seqs);
  u32 own_blocks = 0;
  bool is_invalid = false;
  if (params.cu_seqlens_q == nullptr) {
    own_blocks = uniform_kv_blocks(params, seq_lens, first, end);
  } else {
    own_blocks = ragged_kv_blocks(params, first, end, is_invalid);
  }
  if (__any_sync(~0u, is_invalid)) return false;
  u32 inclusive_sum = own_blocks;  // with all lanes before
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
  u32 begin = __shfl_sync(~0u, inclusive_sum - own_blocks, lane);
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
