// Adds up what the consumer warps of a block have of an item, kMergeRows and kMergeDims at a
// time: by themselves, or by the mergers, warps that do nothing else.

#pragma once

#include "common/params.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "mask_v.cuh"
#include "mma.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ex2.cuh"
#include "shared_memory.cuh"
#include "softmax.cuh"
#include "store_rows.cuh"
#include "tile_scheduler.cuh"
#include "work_pipeline.cuh"

// Four neighbouring values of row `row` of those, from all warps that have kv head `head` of the
// block's.
__device__ inline float4 merged_values(const SharedMemory& shared, int head, int row, int dim,
                                       RowState& state) {
  RowState states[kHeadWarps];
  state = {-kLargest, 0.0f};
#pragma unroll
  for (int place = 0; place < kHeadWarps; ++place) {
    states[place] = shared.states[place * kHeads + head][row / 8][row % 8];
    state.reference = fmaxf(state.reference, states[place].reference);
  }
  float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int place = 0; place < kHeadWarps; ++place) {
    const float weight = ex2_approx(states[place].reference - state.reference);
    state.sum += states[place].sum * weight;
    const float4 part = *reinterpret_cast<const float4*>(
        &shared.merged[place * kHeads + head][row / 8][row % 8][dim]);
    values = add_weighted(values, part, weight);
  }
  return values;
}

// Four neighbouring values of a row, which is finished if the item is a whole unit.
__device__ inline void store_merged(const Params& params, const Item& item, int row, int dim,
                                    RowState state, float4 values) {
  if (item.pieces == 1) return store_finished(params, item, row, dim, state, values);
  const int place = place_of_piece(params, item, item.piece);
  *piece_values(params, place, row, dim) = values;
  if (dim == 0) piece_states(params, place)[row] = state;
}

// Leaves a warp's part of what is merged at a time in shared memory.
__device__ inline void write_part(int first_row, int first_dim, int warp, const Softmax& softmax,
                                  const Output& output, SharedMemory& shared) {
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
    const int place = n % kMergeGroups;
    if ((n - place) * 8 != first_row) continue;
    softmax.publish(n, shared.states[warp][place]);
#pragma unroll
    for (int dim = 0; dim < kHeadDim; dim += kMergeDims) {
      if (dim == first_dim) write_merged(output, n, dim / 16, shared.merged[warp][place]);
    }
  }
}

// Of what is merged at a time of a head, those values that are thread `thread`'s of `threads`.
__device__ inline void merge_parts(const Params& params, const Item& item, u32 count, int first_row,
                                   int first_dim, int thread, int threads,
                                   const SharedMemory& shared) {
  constexpr int kQuads = kMergeDims / 4;
#pragma unroll 1
  for (int task = thread; task < kMergeRows * kQuads; task += threads) {
    const int row_in_part = task / kQuads;
    const int row = first_row + row_in_part;
    if (row >= item.rows) break;
    const int dim_in_part = task % kQuads * 4;
    const int dim = first_dim + dim_in_part;
    RowState state;
    float4 values = merged_values(shared, item.kv_head % kHeads, row_in_part, dim_in_part, state);
    if (shared.nonfinite_items[count % 2] == count) {
      values = restore_nonfinite(params, item, row, dim, values);
    }
    store_merged(params, item, row, dim, state, values);
  }
}

// A thread's place among those that merge what their own head's warps have left.
__device__ inline int head_thread(int warp) {
  return place_of_warp(warp) * kWarpLanes + lane_index();
}

__device__ inline void merge_warps(const Params& params, const Item& item, int warp, u32 count,
                                   const Softmax& softmax, const Output& output,
                                   SharedMemory& shared) {
  // Not unrolled, for the sake of the instructions' cache.
#pragma unroll 1
  for (int first_row = 0; first_row < item.rows; first_row += kMergeRows) {
#pragma unroll 1
    for (int first_dim = 0; first_dim < kHeadDim; first_dim += kMergeDims) {
      barrier_sync(kConsumerBarrier, kConsumerThreads);  // nobody reads any more
      write_part(first_row, first_dim, warp, softmax, output, shared);
      barrier_sync(kConsumerBarrier, kConsumerThreads);
      merge_parts(params, item, count, first_row, first_dim, head_thread(warp), kHeadThreads,
                  shared);
      __syncwarp();
    }
  }
}

// Whether the mergers merge an item: one that is a whole unit, and that another follows. What comes
// last is done sooner by all consumers; and after what they merge themselves they must have met
// before they leave more, as they do where they merge pieces.
__device__ inline bool is_merged_apart(const Item& item, bool has_next) {
  return kMergesApart && item.pieces == 1 && has_next;
}

// For consumers: what they have left for the mergers has been merged.
__device__ inline void await_mergers(bool& are_merging) {
  if (are_merging) barrier_sync(kPartsEmptyBarrier, kConsumerThreads + kMergerThreads);
  are_merging = false;
}

// Leaves an item to the mergers.
__device__ inline void leave_parts(int warp, const Softmax& softmax, const Output& output,
                                   SharedMemory& shared) {
  write_part(0, 0, warp, softmax, output, shared);
  barrier_arrive(kPartsFullBarrier, kConsumerThreads + kMergerThreads);
}

// The mergers: every item that is merged apart.
__device__ inline void merge_items(const Params& params, SharedMemory& shared) {
  const ItemRing& items = shared.items;
  do {
    __syncwarp();
    barrier_sync(kStartBarrier, kThreads);
    barrier_sync(kCheckedBarrier, kThreads);
  } while (!shared.is_start_right);
  if (!kMergesApart || !items.has(0)) return;
  wait_for_previous_kernel();
  const int thread = static_cast<int>(threadIdx.x) - kFirstMerger * kWarpLanes;
#pragma unroll 1
  for (u32 count = 0;; ++count) {
    items.await(count + 1);
    const bool has_next = items.has(count + 1);
    if (is_merged_apart(items.at(count, 0), has_next)) {
      barrier_sync(kPartsFullBarrier, kConsumerThreads + kMergerThreads);
#pragma unroll 1
      for (int head = 0; head < kHeads; ++head) {
        merge_parts(params, items.at(count, head), count, 0, 0, thread, kMergerThreads, shared);
      }
      __syncwarp();
      barrier_arrive(kPartsEmptyBarrier, kConsumerThreads + kMergerThreads);
    }
    if (!has_next) return;
    items.release(count);
  }
}
