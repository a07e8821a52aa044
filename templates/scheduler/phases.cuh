// Phases of a batch-invariant launch whose partials exceed the workspace: the grid computes and
// combines some work tiles at a time. Results do not depend on how many.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"
#include "seq_info.cuh"

// Slots that the workspace has. A template: other kernels lack the parameter.
template <typename KernelParams>
__device__ inline int num_slots_of(const KernelParams& params) {
  if constexpr (kBatchInvariant) return params.num_slots;
  return 0;
}

// In a launch with phases a CTA begins with a work item without rows, and each phase ends with such
// a work item, at which the PV warps combine the phase. They have no splits.
constexpr WorkCoord kNoRows = {0, 0, 0, 0, 0, 0, 0};
__device__ inline bool ends_phase(const WorkSplits& work) { return work.num_splits == 0; }
__device__ inline bool has_phases(const SchedulerStorage& storage) {
  return ends_phase(storage.first_splits);
}

// The range of a CTA before the first phase: nothing begins in it.
__device__ inline ScheduleRange range_before_phases(int total_blocks, int num_ranges, int index) {
  return {total_blocks, num_ranges, index, kFixedOverheadBlocks, 1, 0};
}
__device__ inline bool is_before_phases(const ScheduleRange& range) {
  return range.end < range.begin;
}

// The work tile that the next phase begins with, after the first phase has begun. Aliases what
// find_range has read.
__device__ inline SchedulerState& next_phase(SchedulerStorage& storage) {
  return reinterpret_cast<SchedulerState&>(storage.warp_seqs);
}

// Moves to the first work tile of a sequence from `seq_idx` on that has any.
__device__ inline void move_to_seq(const Params& params, SchedulerState& state, int seq_idx) {
  state.seq_idx = seq_idx;
  state.tile = 0;
#pragma unroll 1
  for (; state.seq_idx < params.num_seqs; ++state.seq_idx) {
    state.seq_info = seq_info_of(params, state.seq_idx);
    if (state.seq_info.num_tiles > 0) break;
  }
}

// Moves behind the `count` work tiles from the current one on, which its sequence has.
__device__ inline void skip_tiles(const Params& params, SchedulerState& state, int count) {
  state.tile += count;
  state.tile_begin += count * tile_kv_blocks(state.seq_info, kFixedOverheadBlocks);
  if (state.tile < state.seq_info.num_tiles) return;
  const int slot = state.seq_info.get_first_slot() + slots_of(state.seq_info);
  move_to_seq(params, state, state.seq_idx + 1);
  state.seq_info.set_first_slot(slot);
}

// Stores a state for a while: scheduler warps have few registers.
__device__ inline void store_state(SchedulerState& target, const SchedulerState& state) {
  __syncwarp();
  if (lane_index() == 0) target = state;
  __syncwarp();
}

// Moves behind the work tiles of the phase that begins with the current one. All splits of a group
// of M tiles belong to one phase: the workspace has slots for them.
__device__ inline void skip_phase(const Params& params, SchedulerState& state) {
  int num_free = num_slots_of(params);
#pragma unroll 1
  while (state.seq_idx < params.num_seqs) {
    const int num_left = state.seq_info.num_tiles - state.tile;
    int count = num_left;
    if (slots_of(state.seq_info) > 0) {
      const int num_splits = static_cast<int>(FixedSplits::of(state.seq_info).count());
      count = min(num_left, num_free / num_splits * num_splits);
      num_free -= count;
    }
    if (count > 0) skip_tiles(params, state, count);
    if (count < num_left) return;
  }
}

// Moves to the first work tile that begins at `linear_block_idx` or later.
__device__ inline void skip_to(const Params& params, SchedulerState& state, int linear_block_idx) {
#pragma unroll 1
  while (state.seq_idx < params.num_seqs && state.tile_begin < linear_block_idx) {
    const int blocks_per_tile = tile_kv_blocks(state.seq_info, kFixedOverheadBlocks);
    const u32 count = static_cast<u32>(linear_block_idx - state.tile_begin + blocks_per_tile - 1) /
                      static_cast<u32>(blocks_per_tile);
    skip_tiles(params, state, min(static_cast<int>(count), state.seq_info.num_tiles - state.tile));
  }
}

// Called by the scheduler warp when the phase before is combined. Stores the range of this CTA in
// the next phase and the work tile to begin with; returns whether there is a phase.
__device__ inline bool begin_phase(const Params& params, bool is_first, SchedulerStorage& storage) {
  SchedulerState state = next_phase(storage);
  if (is_first) {
    state.tile_begin = 0;
    move_to_seq(params, state, 0);
  }
  if (state.seq_idx >= params.num_seqs) return false;
  // Slots are numbered from the beginning of the phase on.
  state.seq_info.set_first_slot(slots_of(state.seq_info) > 0 ? -state.tile : 0);
  store_state(storage.initial_state, state);
  const int begin = state.tile_begin;
  skip_phase(params, state);
  store_state(next_phase(storage), state);
  // Of the KV blocks of the phase each CTA group has an equal part.
  if (lane_index() == 0) {
    ScheduleRange& range = storage.range;
    const u64 num_blocks = static_cast<u64>(state.tile_begin - begin);
    const u32 num_ranges = range.num_ranges;
    const bool is_idle = range.index < 0;
    range.begin = is_idle ? state.tile_begin
                          : begin + static_cast<int>(range.index * num_blocks / num_ranges);
    range.end = is_idle ? state.tile_begin
                        : begin + static_cast<int>((range.index + 1) * num_blocks / num_ranges);
  }
  __syncwarp();
  state = storage.initial_state;
  skip_to(params, state, storage.range.begin);
  store_state(storage.initial_state, state);
  store_state(storage.current_state, state);
  return true;
}
