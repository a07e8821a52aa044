// How the work of a call is divided among the blocks of the grid: each finds its own part.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "seq_info.cuh"

// The tiles of rows of a request are taken in groups, one tile for each member of a team: blocks
// that are neighbours and read the same tokens. A unit is a request and a group. All units in a row
// make a line, on which a unit is as long as it has blocks of tokens, and somewhat longer for what
// else it costs. Every team takes an equal stretch of the line, its span; a unit that lies on
// several spans is computed in as many pieces, which are merged.
// What a unit costs besides its blocks, in blocks: with a wide tile there is more to begin and to
// end.
constexpr int kSmallTileOverheadBlocks = 2;
constexpr int kLargeTileOverheadBlocks = 6;
constexpr int kFixedOverheadBlocks =
    kBlockM > 32 ? kLargeTileOverheadBlocks : kSmallTileOverheadBlocks;
constexpr int kSplitOverheadBlocks = 5;  // of having any pieces to merge, in blocks
constexpr int kMinBlocksPerRange = 2;  // positions
constexpr int kMaxRanges = 144;  // of so many pieces there is room for what is merged

struct SeqInfo {
  i64 first_query;  // index of the request's first query token among all
  int q_len;  // minus one where they end before they begin
  int rows;  // none where the request's queries are not inside the tensor
  int kv_len;
  int num_kv_blocks;  // of tokens
  int num_m_groups;
};

// A number of members as teams, of four members at the most: by constants, for a division takes
// long, and without branches.
__device__ inline int div_by_group_size(const Params& params, u32 count) {
  return static_cast<int>(params.cta_group_size == 3 ? count / 3
                                                     : count >> params.cta_group_size / 2);
}

// `seq_len` is what seq_len_of has for the request.
__device__ inline SeqInfo seq_info_of(const Params& params, int seq_idx, int seq_len) {
  SeqInfo seq_info;
  seq_info.q_len = kIsSparse ? 1 : params.q_len;  // a list belongs to one query token
  seq_info.first_query = static_cast<i64>(seq_idx) * seq_info.q_len;
  bool is_inside = true;
  if (!kIsSparse && params.cu_seqlens_q != nullptr) {
    seq_info.first_query = params.cu_seqlens_q[seq_idx];
    const i64 end = params.cu_seqlens_q[seq_idx + 1];
    const i64 q_len = min(end - seq_info.first_query, static_cast<i64>(0x7fffffff));
    seq_info.q_len = static_cast<int>(max(q_len, static_cast<i64>(-1)));
    is_inside = 0 <= seq_info.first_query && seq_info.first_query <= end &&
                end * params.heads <= params.total_rows;
  }
  seq_info.rows = is_inside ? seq_info.q_len * params.heads : 0;
  seq_info.kv_len = kv_len_of(params, seq_idx, seq_len);
  seq_info.num_kv_blocks = static_cast<u32>(seq_info.kv_len + kBlockN - 1) / kBlockN;
  const u32 m_tiles = static_cast<u32>(seq_info.rows + kBlockM - 1) / kBlockM;
  seq_info.num_m_groups = div_by_group_size(params, m_tiles + params.cta_group_size - 1);
  return seq_info;
}

__device__ inline SeqInfo seq_info_of(const Params& params, int seq_idx) {
  return seq_info_of(params, seq_idx, seq_len_of(params, seq_idx));
}

// The span of a team: the line's positions from `begin` to before `end`. The host sees to it that
// they fit.
struct ScheduleRange {
  int total_blocks;  // length of the line
  int num_ranges;  // in use
  int index;  // of this one; the last span is the first team's, so that no block waits for a later
  int fixed_overhead_blocks;
  int begin;
  int end;
};

// What a warp found of its requests.
enum class SeqLengths { kInvalid, kMixed, kUniform };

struct alignas(kChunkBytes) WarpSeqs {
  int linear_blocks;  // of the line
  int num_kv_blocks;  // of all requests, and their groups, if they are uniform
  int num_m_groups;
  SeqLengths kind;
};

// Where a walk along the units is.
struct SchedulerState {
  SeqInfo seq_info;
  int seq_idx;
  int m_group;
  int tile_begin;
};

// Which queries and tokens an item is about: as much as loading them takes.
struct WorkCoord {
  i64 first_query;  // index of the request's first query token among all
  int seq_idx;  // minus one after the last item
  int first_row;  // of the tile, among the request's rows
  int rows;  // of the tile; the rest of kBlockM is padding
  int first_kv_block;
  int num_kv_blocks;  // of tokens, that this piece computes
  int kv_end;  // tokens that some row of the tile sees
};
constexpr WorkCoord kInvalidWork = {0, -1, 0, 0, 0, 0, 0};

// What a block begins with.
struct alignas(kChunkBytes) SchedMeta {
  ScheduleRange range;
  SchedulerState initial_state;  // at the first item; while that is looked for, at the unit that
                                 // the span begins in, or before it
  WorkCoord first_work;  // of the first item
};

struct SchedulerStorage : SchedMeta {
  WarpSeqs warp_seqs[kThreads / kWarpLanes];
  SchedulerState current_state;  // at the item that was handed on last
};

__device__ inline int linear_kv_blocks(const SeqInfo& seq_info, int fixed_overhead_blocks) {
  return seq_info.num_m_groups * (seq_info.num_kv_blocks + fixed_overhead_blocks);
}

// Whether `a` is a multiple of `b`; of large numbers it may say no.
__device__ inline bool is_multiple(int a, int b) {
  return __float2int_rn(__fdividef(static_cast<float>(a), static_cast<float>(b))) * b == a;
}

// How many spans of the same number of whole units, or whole units of the same number of spans,
// there are at the most; where all units have `num_kv_blocks` blocks. None if merging pieces costs
// less than the idle teams would. By whole warps.
__device__ inline int aligned_ranges(int num_cta_groups, int num_tiles, int num_kv_blocks) {
  const int total_blocks = num_tiles * num_kv_blocks;
  num_cta_groups = min(num_cta_groups, total_blocks);  // no span without a block
  const int num_ranges = max(num_cta_groups - lane_index(), 1);
  const bool is_aligned = is_multiple(num_tiles, num_ranges) || is_multiple(num_ranges, num_tiles);
  const bool is_cheap =
      static_cast<i64>(total_blocks) * num_cta_groups <=
      (total_blocks + static_cast<i64>(kSplitOverheadBlocks) * num_cta_groups) * num_ranges;
  const u32 found = __ballot_sync(~0u, is_aligned && is_cheap);
  return found == 0 ? 0 : max(num_cta_groups - __ffs(static_cast<int>(found)) + 1, 1);
}

// Where span `index` begins: index * total / spans, with `quotient` and `remainder` of the quotient
// of the last two. In floats, in which such small numbers lose nothing, a division is short.
__device__ inline int range_begin_of(int index, int quotient, int remainder, int num_ranges) {
  const float fraction =
      __fdividef(static_cast<float>(index * remainder) + 0.5f, static_cast<float>(num_ranges));
  return index * quotient + __float2int_rz(fraction);
}

// How many requests a thread counts the blocks of, and the first; a thread behind the last request
// looks at that one.
__device__ inline int seqs_per_thread(const Params& params) {
  return ceil_div(params.num_seqs, kThreads);
}

__device__ inline int first_seq_of_thread(const Params& params) {
  const int first = static_cast<int>(threadIdx.x) * seqs_per_thread(params);
  return min(first, params.num_seqs - 1);
}

// Finds the span of the team `cta_group`, by all threads of the block, and leaves it in
// `scheduler_storage`; says whether there is one. `seq_len` is what seq_len_of has for the thread's
// first_seq_of_thread.
__device__ inline bool find_range(const Params& params, int cta_group, int seq_len,
                                  SchedulerStorage& scheduler_storage) {
  const int per_thread = seqs_per_thread(params);
  const int first = static_cast<int>(threadIdx.x) * per_thread;
  const int last = min(first + per_thread, params.num_seqs);
  const int end = first_seq_of_thread(params);
  SeqInfo seq_info;  // in the end of the first
  int num_kv_blocks = 0;
  int num_m_groups = 0;
  int own_blocks = 0;
  bool is_uniform = true;
  bool is_invalid = false;
#pragma unroll 1
  for (int seq_idx = last - 1; seq_idx >= end; --seq_idx) {
    seq_info = seq_info_of(params, seq_idx, seq_idx == end ? seq_len : seq_len_of(params, seq_idx));
    is_uniform &= seq_idx == last - 1 || (seq_info.num_kv_blocks == num_kv_blocks &&
                                          seq_info.num_m_groups == num_m_groups);
    is_invalid |= seq_info.q_len < 0;
    num_kv_blocks = seq_info.num_kv_blocks;
    num_m_groups = seq_info.num_m_groups;
    own_blocks += linear_kv_blocks(seq_info, kFixedOverheadBlocks);
  }
  if (first >= last) own_blocks = 0;
  // All lanes take part in both.
  const int lane_0_blocks = __shfl_sync(~0u, num_kv_blocks, 0);
  const int lane_0_m_groups = __shfl_sync(~0u, num_m_groups, 0);
  is_uniform = __all_sync(
      ~0u, is_uniform && num_kv_blocks == lane_0_blocks && num_m_groups == lane_0_m_groups);
  is_invalid = __any_sync(~0u, is_invalid);
  int inclusive_sum = own_blocks;  // with all lanes before
#pragma unroll
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const int before = __shfl_up_sync(~0u, inclusive_sum, lanes);
    if (lane_index() >= lanes) inclusive_sum += before;
  }
  if (lane_index() == kWarpLanes - 1) {
    const SeqLengths kind = is_uniform ? SeqLengths::kUniform : SeqLengths::kMixed;
    scheduler_storage.warp_seqs[warp_index()] = {inclusive_sum, num_kv_blocks, num_m_groups,
                                                 is_invalid ? SeqLengths::kInvalid : kind};
  }
  __syncthreads();
  // A lane looks at what one warp found; there are fewer warps than lanes.
  constexpr int kWarps = kThreads / kWarpLanes;
  const WarpSeqs found = scheduler_storage.warp_seqs[min(lane_index(), kWarps - 1)];
  const int warp_blocks = lane_index() < kWarps ? found.linear_blocks : 0;
  int total_blocks = __reduce_add_sync(~0u, warp_blocks);
  int begin = __reduce_add_sync(~0u, lane_index() < warp_index() ? warp_blocks : 0);
  begin += inclusive_sum - own_blocks;
  num_kv_blocks = __shfl_sync(~0u, found.num_kv_blocks, 0);
  num_m_groups = __shfl_sync(~0u, found.num_m_groups, 0);
  if (__any_sync(~0u, found.kind == SeqLengths::kInvalid)) return false;
  is_uniform = __all_sync(
      ~0u, found.kind == SeqLengths::kUniform && found.num_kv_blocks == num_kv_blocks &&
               found.num_m_groups == num_m_groups && num_kv_blocks > 0 && num_m_groups > 0);
  int num_ranges =
      max(1, min(min(params.num_cta_groups, kMaxRanges), total_blocks / kMinBlocksPerRange));
  int fixed_overhead_blocks = kFixedOverheadBlocks;
  if (is_uniform) {
    const int aligned = aligned_ranges(num_ranges, params.num_seqs * num_m_groups, num_kv_blocks);
    if (aligned > 0) {
      num_ranges = aligned;
      fixed_overhead_blocks = 0;
      const int seq_blocks = num_m_groups * num_kv_blocks;
      total_blocks = params.num_seqs * seq_blocks;
      begin = min(first, params.num_seqs) * seq_blocks;
      own_blocks = max(last - first, 0) * seq_blocks;
    }
  }
  const int index = num_ranges - 1 - cta_group;
  if (index < 0 || total_blocks == 0) return false;
  const int quotient = static_cast<u32>(total_blocks) / static_cast<u32>(num_ranges);
  const int remainder = total_blocks - quotient * num_ranges;
  const int range_begin = range_begin_of(index, quotient, remainder, num_ranges);
  if (begin <= range_begin && range_begin < begin + own_blocks) {
    const int blocks_per_tile = seq_info.num_kv_blocks + fixed_overhead_blocks;
    // It may begin in a later one of the thread's requests, to which the walk comes.
    int m_group = 0;
    if (seq_info.num_m_groups != 1) {
      m_group = min(static_cast<int>(static_cast<u32>(range_begin - begin) / blocks_per_tile),
                    seq_info.num_m_groups - 1);
    }
    const int range_end = range_begin_of(index + 1, quotient, remainder, num_ranges);
    scheduler_storage.range = {total_blocks,          num_ranges,  index,
                               fixed_overhead_blocks, range_begin, range_end};
    scheduler_storage.initial_state = {seq_info, first, m_group, begin + m_group * blocks_per_tile};
  }
  __syncthreads();
  return true;
}
