// Adds up what the consumer warps of a block have of an item, kCombineRows and kCombineDims at a
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
__device__ inline float4 combined_values(const SharedMemoryPlan& smem, int head, int row, int dim,
                                         RowState& state) {
  RowState states[kHeadWarps];
  state = {-kFloatMax, 0.0f};
#pragma unroll
  for (int rank = 0; rank < kHeadWarps; ++rank) {
    states[rank] = smem.states[rank * kHeads + head][row / 8][row % 8];
    state.row_max = fmaxf(state.row_max, states[rank].row_max);
  }
  float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int rank = 0; rank < kHeadWarps; ++rank) {
    const float weight = ex2_approx(states[rank].row_max - state.row_max);
    state.row_sum += states[rank].row_sum * weight;
    const float4 partial = *reinterpret_cast<const float4*>(
        &smem.combine_buffer[rank * kHeads + head][row / 8][row % 8][dim]);
    values = add_weighted(values, partial, weight);
  }
  return values;
}

// Four neighbouring values of a row, which is finished if the item is a whole unit.
__device__ inline void store_combined(const Params& params, const WorkItem& work, int row, int dim,
                                      RowState state, float4 values) {
  if (work.num_splits == 1) return store_finished(params, work, row, dim, state, values);
  const int slot = partial_slot(params, work, work.split_idx);
  *partial_values(params, slot, row, dim) = values;
  if (dim == 0) partial_states(params, slot)[row] = state;
}

// Leaves a warp's part of what is merged at a time in shared memory.
__device__ inline void store_warp_partial(int first_row, int first_dim, int warp,
                                          const Softmax& softmax, const Output& output,
                                          SharedMemoryPlan& smem) {
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
    const int group = n % kCombineRowGroups;
    if ((n - group) * 8 != first_row) continue;
    softmax.publish(n, smem.states[warp][group]);
#pragma unroll
    for (int dim = 0; dim < kHeadDim; dim += kCombineDims) {
      if (dim == first_dim)
        store_to_combine_buffer(output, n, dim / 16, smem.combine_buffer[warp][group]);
    }
  }
}

// Of what is merged at a time of a head, those values that are thread `thread`'s of `threads`.
__device__ inline void combine_partials(const Params& params, const WorkItem& work, u32 work_idx,
                                        int first_row, int first_dim, int thread, int threads,
                                        const SharedMemoryPlan& smem) {
  constexpr int kQuads = kCombineDims / 4;
#pragma unroll 1
  for (int vec_idx = thread; vec_idx < kCombineRows * kQuads; vec_idx += threads) {
    const int row_in_buffer = vec_idx / kQuads;
    const int row = first_row + row_in_buffer;
    if (row >= work.rows) break;
    const int dim_in_buffer = vec_idx % kQuads * 4;
    const int dim = first_dim + dim_in_buffer;
    RowState state;
    float4 values =
        combined_values(smem, work.kv_head % kHeads, row_in_buffer, dim_in_buffer, state);
    if (smem.nonfinite_work[work_idx % 2] == work_idx) {
      values = restore_nonfinite(params, work, row, dim, values);
    }
    store_combined(params, work, row, dim, state, values);
  }
}

// A thread's place among those that merge what their own head's warps have left.
__device__ inline int head_thread(int warp) {
  return rank_of_warp(warp) * kWarpLanes + lane_index();
}

__device__ inline void combine_warps(const Params& params, const WorkItem& work, int warp,
                                     u32 work_idx, const Softmax& softmax, const Output& output,
                                     SharedMemoryPlan& smem) {
  // Not unrolled, for the sake of the instructions' cache.
#pragma unroll 1
  for (int first_row = 0; first_row < work.rows; first_row += kCombineRows) {
#pragma unroll 1
    for (int first_dim = 0; first_dim < kHeadDim; first_dim += kCombineDims) {
      barrier_sync(kConsumerBarrier, kConsumerThreads);  // nobody reads any more
      store_warp_partial(first_row, first_dim, warp, softmax, output, smem);
      barrier_sync(kConsumerBarrier, kConsumerThreads);
      combine_partials(params, work, work_idx, first_row, first_dim, head_thread(warp),
                       kHeadThreads, smem);
      __syncwarp();
    }
  }
}

// Whether the mergers merge an item: one that is a whole unit, and that another follows. What comes
// last is done sooner by all consumers; and after what they merge themselves they must have met
// before they leave more, as they do where they merge pieces.
__device__ inline bool uses_epilogue_warps(const WorkItem& work, bool has_next) {
  return kHasEpilogueWarps && work.num_splits == 1 && has_next;
}

// For consumers: what they have left for the mergers has been merged.
__device__ inline void wait_for_epilogue(bool& is_epilogue_busy) {
  if (is_epilogue_busy) barrier_sync(kPartialsEmptyBarrier, kConsumerThreads + kEpilogueThreads);
  is_epilogue_busy = false;
}

// Leaves an item to the mergers.
__device__ inline void publish_partials(int warp, const Softmax& softmax, const Output& output,
                                        SharedMemoryPlan& smem) {
  store_warp_partial(0, 0, warp, softmax, output, smem);
  barrier_arrive(kPartialsFullBarrier, kConsumerThreads + kEpilogueThreads);
}

// The mergers: every item that is merged apart.
__device__ inline void epilogue_loop(const Params& params, SharedMemoryPlan& smem) {
  const WorkPipeline& pipeline = smem.work_pipeline;
  do {
    __syncwarp();
    barrier_sync(kStartBarrier, kThreads);
    barrier_sync(kCheckedBarrier, kThreads);
  } while (!smem.is_first_work_valid);
  if (!kHasEpilogueWarps || !pipeline.has(0)) return;
  pdl_wait();
  const int thread = static_cast<int>(threadIdx.x) - kFirstEpilogueWarp * kWarpLanes;
#pragma unroll 1
  for (u32 work_idx = 0;; ++work_idx) {
    pipeline.wait_full(work_idx + 1);
    const bool has_next = pipeline.has(work_idx + 1);
    if (uses_epilogue_warps(pipeline.at(work_idx, 0), has_next)) {
      barrier_sync(kPartialsFullBarrier, kConsumerThreads + kEpilogueThreads);
#pragma unroll 1
      for (int head = 0; head < kHeads; ++head) {
        combine_partials(params, pipeline.at(work_idx, head), work_idx, 0, 0, thread,
                         kEpilogueThreads, smem);
      }
      __syncwarp();
      barrier_arrive(kPartialsEmptyBarrier, kConsumerThreads + kEpilogueThreads);
    }
    if (!has_next) return;
    pipeline.release(work_idx);
  }
}
