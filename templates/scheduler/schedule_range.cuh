// Stream-K schedule (load-balanced split-KV): each CTA computes its own range of KV blocks.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "seq_info.cuh"

// A CTA group is a set of neighbouring CTAs that share KV through L2. The row tiles of a sequence
// form groups of one tile per CTA of a CTA group; a work tile is one sequence and one such group.
// The work tiles, laid end to end, make the linearised KV-block space: a tile occupies its KV
// blocks plus a fixed overhead in front of them. Each CTA group processes one contiguous range of
// that space, all ranges being equally long. A tile that crosses range boundaries is split, one
// split per range, and the splits are combined.

struct SeqInfo {
  i64 first_query;  // index of the sequence's first query token in the query tensor
  int q_len;  // -1 where cu_seqlens_q decreases
  int rows;  // 0 where the query tokens are not inside the query tensor
  int kv_len;
  int num_kv_blocks;
  int num_m_groups;
};

// Divides by the CTA group size, 1 to 4. Divisors are constants, because an integer division takes
// many instructions, and a select replaces branches.
__device__ inline int div_by_group_size(const Params& params, u32 count) {
  return static_cast<int>(params.cta_group_size == 3 ? count / 3
                                                     : count >> params.cta_group_size / 2);
}

// `seq_len` is seq_len_of(seq_idx).
__device__ inline SeqInfo seq_info_of(const Params& params, int seq_idx, int seq_len) {
  SeqInfo seq_info;
  seq_info.q_len = kIsSparse ? 1 : params.q_len;  // each query token has its own top-k indices
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

// Range of a CTA group: linear block indices [begin, end). The host guarantees that the linearised
// KV-block space fits in int32.
struct ScheduleRange {
  int total_blocks;  // of the linearised KV-block space
  int num_ranges;  // in use
  // In reverse order of CTA groups, so a pairwise combine waits for a CTA scheduled before it. With
  // more splits CTAs wait for each other, which the co-resident grid makes safe.
  int index;
  int fixed_overhead_blocks;
  int begin;
  int end;
};

// Whether all sequences of a warp have the same number of KV blocks and row-tile groups.
enum class SeqLengths { kInvalid, kMixed, kUniform };

struct alignas(kChunkBytes) WarpSeqs {
  int linear_blocks;  // sum over the warp's sequences
  int num_kv_blocks;  // of each sequence, as is num_m_groups, if the kind is kUniform
  int num_m_groups;
  SeqLengths kind;
};

// State of the tile scheduler: the current work tile.
struct SchedulerState {
  SeqInfo seq_info;
  int seq_idx;
  int m_group;
  int tile_begin;  // linear block index of the tile's overhead
};

// Coordinates of a work item: what loading its Q and KV needs.
struct WorkCoord {
  i64 first_query;  // index of the sequence's first query token in the query tensor
  int seq_idx;  // -1 after the last work item
  int first_row;  // of the row tile, among the sequence's rows
  int rows;  // of the row tile; the other rows up to kBlockM are padding
  int first_kv_block;
  int num_kv_blocks;  // of this split
  int kv_end;  // end of the tokens that any row of the tile attends to
};
constexpr WorkCoord kInvalidWork = {0, -1, 0, 0, 0, 0, 0};

// Scheduler metadata of a CTA.
struct alignas(kChunkBytes) SchedMeta {
  ScheduleRange range;
  // At the first work item. find_range stores the work tile that the range begins in, or one before
  // it, from which initial_work advances.
  SchedulerState initial_state;
  WorkCoord first_work;
};

struct SchedulerStorage : SchedMeta {
  WarpSeqs warp_seqs[kThreads / kWarpLanes];
  SchedulerState current_state;  // at the last published work item
};

__device__ inline int linear_kv_blocks(const SeqInfo& seq_info, int fixed_overhead_blocks) {
  return seq_info.num_m_groups * (seq_info.num_kv_blocks + fixed_overhead_blocks);
}

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

// First linear block index of range `index`: index * total_blocks / num_ranges, from `quotient` and
// `remainder` of the latter two. The float division is exact for numbers this small, and takes
// fewer instructions than an integer division.
__device__ inline int range_begin_of(int index, int quotient, int remainder, int num_ranges) {
  const float fraction =
      __fdividef(static_cast<float>(index * remainder) + 0.5f, static_cast<float>(num_ranges));
  return index * quotient + __float2int_rz(fraction);
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
  // Shuffles need all lanes: no short-circuit evaluation.
  const int lane_0_blocks = __shfl_sync(~0u, num_kv_blocks, 0);
  const int lane_0_m_groups = __shfl_sync(~0u, num_m_groups, 0);
  is_uniform = __all_sync(
      ~0u, is_uniform && num_kv_blocks == lane_0_blocks && num_m_groups == lane_0_m_groups);
  is_invalid = __any_sync(~0u, is_invalid);
  int inclusive_sum = own_blocks;  // prefix sum over the lanes
#pragma unroll
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const int lower_sum = __shfl_up_sync(~0u, inclusive_sum, lanes);
    if (lane_index() >= lanes) inclusive_sum += lower_sum;
  }
  if (lane_index() == kWarpLanes - 1) {
    const SeqLengths kind = is_uniform ? SeqLengths::kUniform : SeqLengths::kMixed;
    scheduler_storage.warp_seqs[warp_index()] = {inclusive_sum, num_kv_blocks, num_m_groups,
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
    // The range may begin in a later sequence of the thread; the scheduler advances to it.
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
