// Stream-K schedule (load-balanced split-KV): each CTA computes its own range of KV blocks, and
// proceeds through the work tiles in it.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "seq_info.cuh"

// A CTA group is a set of neighboring CTAs that share KV through L2. The work tiles of all
// sequences, laid end to end, make the linearized KV-block space: a tile occupies its KV blocks
// plus a fixed overhead in front of them. Each CTA group processes one contiguous range of that
// space, all ranges being equally long. A tile that crosses range boundaries is split, one split
// per range, and the splits are combined.

// Range of a CTA group: linear block indices [begin, end). The host guarantees that the linearized
// KV-block space fits in int32.
struct ScheduleRange {
  int total_blocks;  // of the linearized KV-block space
  int num_ranges;  // in use
  // In reverse order of CTA groups, so the only reducer of two splits waits for a CTA scheduled
  // before it. Several reducers wait for each other, which the co-resident grid makes safe.
  int index;
  int fixed_overhead_blocks;
  int begin;
  int end;
};

// Work tiles of a CTA group, in batch-invariant kernels: few of them in any order, which have a
// list instead of a range. Their linear block indices are indices in the list.
constexpr int kMaxListedTiles = 8;
struct ListedTile {
  u16 seq_idx;
  u16 tile;
  u16 first_slot;  // of the sequence
};

template <bool kHasList>
struct CtaRangeOf : ScheduleRange {
  __device__ void clear_list() {}
};
template <>
struct CtaRangeOf<true> : ScheduleRange {
  u16 num_listed;  // 0: the range has all work tiles that begin in it
  ListedTile listed[kMaxListedTiles];

  __device__ void clear_list() { num_listed = 0; }
};
using CtaRange = CtaRangeOf<kBatchInvariant>;

// First linear block index of range `index`: index * total_blocks / num_ranges, from `quotient` and
// `remainder` of the latter two. The float division is exact for numbers this small, and takes
// fewer instructions than an integer division.
__device__ inline int range_begin_of(int index, int quotient, int remainder, int num_ranges) {
  const float fraction =
      __fdividef(static_cast<float>(index * remainder) + 0.5f, static_cast<float>(num_ranges));
  return index * quotient + __float2int_rz(fraction);
}

__device__ inline ScheduleRange range_at(int index, int num_ranges, int total_blocks,
                                         int fixed_overhead_blocks) {
  const int quotient = static_cast<u32>(total_blocks) / static_cast<u32>(num_ranges);
  const int remainder = total_blocks - quotient * num_ranges;
  const int begin = range_begin_of(index, quotient, remainder, num_ranges);
  const int end = range_begin_of(index + 1, quotient, remainder, num_ranges);
  return {total_blocks, num_ranges, index, fixed_overhead_blocks, begin, end};
}

// Sum of `value` over the lanes up to this one.
__device__ inline int inclusive_sum_of_lanes(int value) {
  int inclusive_sum = value;
#pragma unroll
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const int lower_sum = __shfl_up_sync(~0u, inclusive_sum, lanes);
    if (lane_index() >= lanes) inclusive_sum += lower_sum;
  }
  return inclusive_sum;
}

// Splits of a work tile: one per range, from `first_range` on.
struct Splits {
  int num_splits;
  int first_range;
  bool ends_at_range;  // the tile's last split ends its range
};

// The first range that begins at or after a linear block index: the smallest index with
// index * total_blocks >= linear_block_idx * num_ranges. The float quotient is off by one at most,
// and takes a tenth of the instructions of a 64-bit division.
__device__ inline int first_range_from(int linear_block_idx, const ScheduleRange& range) {
  const i64 scaled = static_cast<i64>(linear_block_idx) * range.num_ranges;
  const float ranges_per_block =
      __fdividef(static_cast<float>(range.num_ranges), static_cast<float>(range.total_blocks));
  int index = __float2int_rz(static_cast<float>(linear_block_idx) * ranges_per_block) - 1;
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    if (static_cast<i64>(index) * range.total_blocks < scaled) ++index;
  }
  return index;
}

__device__ inline Splits splits_of(int tile_begin, int num_kv_blocks, const ScheduleRange& range) {
  const int first_kv_block = tile_begin + range.fixed_overhead_blocks;
  const int second_range = first_range_from(first_kv_block + 1, range);
  const int end = first_kv_block + num_kv_blocks;
  const int end_range = first_range_from(end, range);
  const bool ends_at_range = static_cast<u64>(end_range) * range.total_blocks <
                             static_cast<u64>(end + 1) * range.num_ranges;
  return {1 + end_range - second_range, second_range - 1, ends_at_range};
}

// Linear KV blocks of a work tile. Without a fixed overhead an empty tile counts as one block, so
// that a CTA writes its zeros.
__device__ inline int tile_kv_blocks(const SeqInfo& seq_info, int fixed_overhead_blocks) {
  const int blocks = seq_info.num_kv_blocks + fixed_overhead_blocks;
  return kFixedOverheadBlocks == 0 ? max(blocks, 1) : blocks;
}

__device__ inline int linear_kv_blocks(const SeqInfo& seq_info, int fixed_overhead_blocks) {
  return seq_info.num_tiles * tile_kv_blocks(seq_info, fixed_overhead_blocks);
}

// Current work tile of a CTA.
struct SchedulerState {
  SeqInfo seq_info;
  int seq_idx;
  int tile;  // of the sequence
  int tile_begin;  // linear block index of the tile's overhead

  // Advances to the next work tile; returns whether it begins within the range.
  __device__ bool advance(const Params& params, const ScheduleRange& range) {
    tile_begin += tile_kv_blocks(seq_info, range.fixed_overhead_blocks);
    if (tile_begin >= range.end) return false;
    if (++tile < seq_info.num_tiles) return true;
    tile = 0;
#pragma unroll 1
    while (++seq_idx < params.num_seqs) {
      seq_info = seq_info_of(params, seq_idx);
      if (seq_info.num_tiles > 0) return true;
    }
    return false;  // only if lengths change during the launch
  }

  // The tile's KV blocks inside the range, relative to the tile: [first_kv_block, end_kv_block).
  __device__ int first_kv_block(const ScheduleRange& range) const {
    return range.begin > tile_begin ? kv_block_in_tile(range.begin, range) : 0;
  }
  __device__ int end_kv_block(const ScheduleRange& range) const {
    const int tile_end = tile_begin + tile_kv_blocks(seq_info, range.fixed_overhead_blocks);
    return range.end < tile_end ? kv_block_in_tile(range.end, range) : seq_info.num_kv_blocks;
  }

  // The overhead in front of the KV blocks belongs to the first.
  __device__ int kv_block_in_tile(int linear_block_idx, const ScheduleRange& range) const {
    return max(linear_block_idx - tile_begin - range.fixed_overhead_blocks, 0);
  }

  __device__ Splits splits(const ScheduleRange& range) const {
    Splits splits = {1, range.index, true};
    if (first_kv_block(range) > 0 || end_kv_block(range) < seq_info.num_kv_blocks) {
      splits = splits_of(tile_begin, seq_info.num_kv_blocks, range);
    }
    return splits;
  }
};

// Coordinates of a work item: what loading its Q and KV needs.
struct WorkCoord {
  decltype(SeqInfo::first_query) first_query;  // index of the sequence's first query token
  int seq_idx;  // -1 after the last work item
  int first_row;  // of the M tile, among the sequence's rows
  int rows;  // of the M tile; the other rows up to kBlockM are padding
  int first_kv_block;
  int num_kv_blocks;  // of this split
  int kv_end;  // end of the tokens that any row of the tile attends to
};
constexpr WorkCoord kInvalidWork = {0, -1, 0, 0, 0, 0, 0};

// Splits of the work tile of a work item, and this CTA's part in their combine.
struct WorkSplits {
  int num_splits;
  // The first `num_reducers` splits reduce a subtile each. The last split does so only if its CTA
  // has no work item after it.
  int num_reducers;
  int subtile_frags;
  int split_idx;
  union {
    int first_cta;  // of split 0, which is the last of its range
    int first_slot;  // of split 0 in the workspace, in batch-invariant kernels
  };
};

// Whether all sequences of a warp have the same number of KV blocks and work tiles.
enum class SeqLengths { kInvalid, kMixed, kUniform };

struct alignas(kChunkBytes) WarpSeqs {
  int linear_blocks;  // sum over the warp's sequences
  int num_kv_blocks;  // of each sequence, as is num_tiles, if the kind is kUniform
  int num_tiles;
  SeqLengths kind;
};

// Scheduler metadata of a CTA.
struct alignas(kChunkBytes) SchedMeta {
  CtaRange range;
  // At the first work item. find_range stores the work tile that the range begins in, or one before
  // it, from which initial_work advances.
  SchedulerState initial_state;
  WorkCoord first_work;
  WorkSplits first_splits;  // of `first_work`
};

struct SchedulerStorage : SchedMeta {
  WarpSeqs warp_seqs[kThreads / kWarpLanes];
  SchedulerState current_state;  // at the last published work item
};
