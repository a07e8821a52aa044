// Stream-K tile scheduler: iterates over the work items of a CTA's range. A work item is one split
// of one work tile, for the M tile of this CTA's rank in its CTA group.

#pragma once

#include "combine/subtile_frags.cuh"
#include "common/block_table.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/mov.cuh"
#include "scheduler/schedule_range.cuh"
#include "seq_info.cuh"

// One split of one work tile, as the scheduler publishes it to all warps of the CTA.
struct WorkItem : WorkCoord, WorkSplits {
  u32 work_idx;  // index among the CTA's work items
  int unmasked_kv_end;  // end of the tokens that every row of the tile attends to
  int row_kv_end[kBlockM];  // end of the tokens that a row attends to
};

// Called by whole warps.
struct TileScheduler : SchedulerState {
  const Params& params;
  const CtaRange& range;
  int rank_in_group;

  // Before the initial work is found, a CTA has neither a rank nor a state.
  __device__ TileScheduler(const Params& params, const CtaRange& range, int rank_in_group = 0,
                           const SchedulerState& state = {})
      : SchedulerState(state), params(params), range(range), rank_in_group(rank_in_group) {}

  // Coordinates of the current work item; kInvalidWork if the current tile has none for this CTA.
  __device__ WorkCoord current_work() const {
    int first;
    int last;
    bool has_work;
    int m_group = tile;
    if constexpr (kBatchInvariant) {
      // A range has the splits that begin in it, and a list all of its own.
      const u32 num_splits = FixedSplits::of(seq_info).count();
      m_group = static_cast<u32>(tile) / num_splits;
      first = static_cast<int>(tile - m_group * num_splits) * seq_info.num_kv_blocks;
      last = first + seq_info.num_kv_blocks;
      has_work = range.begin <= tile_begin && tile_begin < range.end;
    } else {
      first = first_kv_block(range);
      last = end_kv_block(range);
      has_work = seq_info.num_kv_blocks == 0 ? range.begin <= tile_begin : first < last;
    }
    const int first_row = (m_group * params.cta_group_size + rank_in_group) * kBlockM;
    if (!has_work || first_row >= seq_info.rows) return kInvalidWork;
    const int rows = min(seq_info.rows - first_row, kBlockM);
    // An integer division here would leave the MMAs too few registers; rows mask the rest.
    const int kv_end = kHasDcp ? seq_info.kv_len : kv_end_of_row(first_row + rows - 1);
    const int attended_blocks = static_cast<u32>(kv_end + kBlockN - 1) / kBlockN;
    const int num_kv_blocks = max(min(last, attended_blocks) - first, 0);
    return {seq_info.first_query, seq_idx, first_row, rows, first, num_kv_blocks, kv_end};
  }

  // Advances to the next work tile, as advance() does, or to the next one of the list.
  __device__ bool advance_tile() {
    if constexpr (kBatchInvariant) return advance_split(range);
    return advance(params, range);
  }

  // A template: other ranges have no list.
  template <typename Range>
  __device__ bool advance_split(const Range& range) {
    int slot = seq_info.get_first_slot() + slots_of(seq_info);
    if (range.num_listed > 0) {
      if (++tile_begin >= range.end) return false;
      const ListedTile& next = range.listed[tile_begin];
      tile = next.tile;
      if (seq_idx == next.seq_idx) return true;
      seq_idx = next.seq_idx - 1;
      slot = next.first_slot;
    } else {
      tile_begin += tile_kv_blocks(seq_info, kFixedOverheadBlocks);
      if (tile_begin >= range.end) return false;
      if (++tile < seq_info.num_tiles) return true;
      tile = 0;
    }
#pragma unroll 1
    while (++seq_idx < params.num_seqs) {
      seq_info = seq_info_of(params, seq_idx);
      seq_info.set_first_slot(slot);
      if (tile < seq_info.num_tiles) return true;
    }
    return false;  // only if lengths change during the launch
  }

  // Advances to the next work item and returns its coordinates; kInvalidWork after the last one.
  // `is_first` starts at the current tile instead of the next one.
  __device__ WorkCoord next_work(bool is_first) {
    WorkCoord coord;
#pragma unroll 1
    do {
      if (!is_first && !advance_tile()) return kInvalidWork;
      is_first = false;
      coord = current_work();
    } while (coord.seq_idx < 0);
    return coord;
  }

  // The first work item, from the tile of `initial_state` on.
  __device__ WorkCoord initial_work() {
    u32 is_first = 1;
    mov_b32(is_first);  // opaque: otherwise the compiler peels the first iteration
    return next_work(is_first != 0);
  }

  // Writes the current work item, of which `coord` is the coordinates, without its splits.
  __device__ void fill_tokens(WorkItem& work, const WorkCoord& coord, u32 work_idx) const {
    if constexpr (!kIsSparse) {  // sparse rows attend to all top-k indices
#pragma unroll 1
      for (int row = reload_lane(); row < kBlockM; row += kWarpLanes) {
        work.row_kv_end[row] = row < coord.rows ? kv_end_of_row(coord.first_row + row) : 0;
      }
    }
    if (reload_lane() != 0) return;
    static_cast<WorkCoord&>(work) = coord;
    work.work_idx = work_idx;
    work.unmasked_kv_end = kHasDcp ? work.row_kv_end[0] : kv_end_of_row(coord.first_row);
  }

  // Writes the splits of the current work item.
  __device__ void fill_splits(WorkSplits& work) const {
    if constexpr (kBatchInvariant) {
      const u32 num_splits = FixedSplits::of(seq_info).count();
      work.num_splits = work.num_reducers = static_cast<int>(num_splits);
      work.subtile_frags = frags_per_subtile(num_splits);
      work.split_idx = static_cast<int>(static_cast<u32>(tile) % num_splits);
      work.first_slot =
          (seq_info.get_first_slot() + tile - work.split_idx) * params.cta_group_size +
          rank_in_group;
      return;
    }
    const Splits splits = this->splits(range);
    work.num_splits = splits.num_splits;
    work.num_reducers = splits.num_splits - (splits.ends_at_range ? 0 : 1);
    work.subtile_frags = frags_per_subtile(work.num_reducers);
    work.split_idx = first_kv_block(range) == 0 ? 0 : range.index - splits.first_range;
    work.first_cta = cta_of_range(splits.first_range);
  }

  // End of the tokens that a row of the sequence attends to: its own position under a causal mask.
  __device__ int kv_end_of_row(int row) const {
    if (kIsSparse || !params.is_causal || (!kHasDcp && seq_info.q_len <= 1)) return seq_info.kv_len;
    const u32 token = static_cast<u32>(row) / static_cast<u32>(params.heads);
    if constexpr (kHasDcp) {
      return dcp_kv_end(params, seq_idx, seq_info.kv_len, seq_info.q_len, static_cast<int>(token));
    }
    return max(seq_info.kv_len - (seq_info.q_len - 1 - static_cast<int>(token)), 0);
  }

  // The CTA that has a range, at this CTA's rank in the CTA group.
  __device__ int cta_of_range(int index) const {
    return (range.num_ranges - 1 - index) * params.cta_group_size + rank_in_group;
  }
};

// Slot and phase in the work pipeline: two slots for work items, one buffer for Q.
__device__ inline u32 work_slot(u32 work_idx) { return work_idx % 2; }
__device__ inline u32 work_phase(u32 work_idx) { return work_idx / 2 % 2; }
__device__ inline u32 query_phase(u32 work_idx) { return work_idx % 2; }
