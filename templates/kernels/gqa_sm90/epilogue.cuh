// Epilogue of a work item: combines the partial O of the consumer warps through shared memory, in
// sub-tiles of kCombineRows x kCombineDims. The consumers or the dedicated epilogue warps do it.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "mask_v.cuh"
#include "mma.cuh"
#include "ptx/arithmetic.cuh"
#include "shared_memory.cuh"
#include "softmax.cuh"
#include "store_rows.cuh"
#include "work_item.cuh"
#include "work_pipeline.cuh"

// Combines four adjacent dims of a row over all warps of kv head `head` of the CTA.
__device__ inline float4 combined_out(const SharedMemoryPlan& smem, int head, int row, int dim,
                                      RowState& state) {
  RowState states[kWarpsPerHead];
  state = {-kFloatMax, 0.0f};
#pragma unroll
  for (int rank = 0; rank < kWarpsPerHead; ++rank) {
    states[rank] = smem.states[rank * kHeadsPerCta + head][row / 8][row % 8];
    state.row_max = fmaxf(state.row_max, states[rank].row_max);
  }
  float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int rank = 0; rank < kWarpsPerHead; ++rank) {
    const float weight = ex2_approx(states[rank].row_max - state.row_max);
    state.row_sum += states[rank].row_sum * weight;
    const float4 partial = *reinterpret_cast<const float4*>(
        &smem.combine_buffer[rank * kHeadsPerCta + head][row / 8][row % 8][dim]);
    out = add_weighted(out, partial, weight);
  }
  return out;
}

// Stores four adjacent dims of a row: final if the work tile is not split, else partial.
__device__ inline void store_combined(const Params& params, const WorkItem& work, int row, int dim,
                                      RowState state, float4 out) {
  if (work.num_splits == 1) return store_finished(params, work, row, dim, state, out);
  const int slot = partial_slot(params, work, work.split_idx);
  *partial_out_ptr(params, slot, row, dim) = out;
  if (dim == 0) partial_states(params, slot)[row] = state;
}

// Stores a warp's share of a sub-tile to the combine buffer.
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

// Combines the sub-tile of one kv head; thread `thread` of `threads` takes every `threads`-th
// vector.
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
    float4 out =
        combined_out(smem, work.kv_head % kHeadsPerCta, row_in_buffer, dim_in_buffer, state);
    if (smem.nonfinite_work[work_idx % 2] == work_idx) {
      out = restore_nonfinite(params, work, row, dim, out);
    }
    store_combined(params, work, row, dim, state, out);
  }
}

// Index of this thread among the consumer threads of its kv head.
__device__ inline int thread_in_head(int warp) {
  return rank_of_warp(warp) * kWarpLanes + lane_index();
}

__device__ inline void combine_warps(const Params& params, const WorkItem& work, int warp,
                                     u32 work_idx, const Softmax& softmax, const Output& output,
                                     SharedMemoryPlan& smem) {
  // Not unrolled, to limit the I-cache footprint.
#pragma unroll 1
  for (int first_row = 0; first_row < work.rows; first_row += kCombineRows) {
#pragma unroll 1
    for (int first_dim = 0; first_dim < kHeadDim; first_dim += kCombineDims) {
      named_barrier_sync(NamedBarrier::ConsumersSynced,
                         kConsumerThreads);  // no warp reads the buffer any more
      store_warp_partial(first_row, first_dim, warp, softmax, output, smem);
      named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
      combine_partials(params, work, work_idx, first_row, first_dim, thread_in_head(warp),
                       kThreadsPerHead, smem);
      __syncwarp();
    }
  }
}

// Whether the epilogue warps combine an item: an unsplit work tile that another item follows. All
// consumers together finish the last item sooner. After an item that consumers combine themselves,
// they must sync before they store to the buffer again: combine_splits does after a split.
__device__ inline bool uses_epilogue_warps(const WorkItem& work, bool has_next) {
  return kUsesEpilogueWarps && work.num_splits == 1 && has_next;
}

// Consumers wait here until the epilogue warps have read the combine buffer.
__device__ inline void wait_for_epilogue(bool& is_epilogue_busy) {
  if (is_epilogue_busy)
    named_barrier_sync(NamedBarrier::PartialsFree, kConsumerThreads + kEpilogueThreads);
  is_epilogue_busy = false;
}

// Publishes the partials of an item to the epilogue warps.
__device__ inline void publish_partials(int warp, const Softmax& softmax, const Output& output,
                                        SharedMemoryPlan& smem) {
  store_warp_partial(0, 0, warp, softmax, output, smem);
  named_barrier_arrive(NamedBarrier::PartialsReady, kConsumerThreads + kEpilogueThreads);
}

// Epilogue warps: combine and store the items for which uses_epilogue_warps holds.
__device__ inline void epilogue_loop(const Params& params, SharedMemoryPlan& smem) {
  const WorkPipeline& work_pipeline = smem.work_pipeline;
  do {
    __syncwarp();
    named_barrier_sync(NamedBarrier::FirstWorkReady, kThreads);
    named_barrier_sync(NamedBarrier::FirstWorkChecked, kThreads);
  } while (!smem.is_first_work_valid);
  if (!kUsesEpilogueWarps || !work_pipeline.has(0)) return;
  pdl_wait();
  const int thread = static_cast<int>(threadIdx.x) - kFirstEpilogueWarp * kWarpLanes;
#pragma unroll 1
  for (u32 work_idx = 0;; ++work_idx) {
    work_pipeline.wait_full(work_idx + 1);
    const bool has_next = work_pipeline.has(work_idx + 1);
    if (uses_epilogue_warps(work_pipeline.at(work_idx, 0), has_next)) {
      named_barrier_sync(NamedBarrier::PartialsReady, kConsumerThreads + kEpilogueThreads);
#pragma unroll 1
      for (int head = 0; head < kHeadsPerCta; ++head) {
        combine_partials(params, work_pipeline.at(work_idx, head), work_idx, 0, 0, thread,
                         kEpilogueThreads, smem);
      }
      __syncwarp();
      named_barrier_arrive(NamedBarrier::PartialsFree, kConsumerThreads + kEpilogueThreads);
    }
    if (!has_next) return;
    work_pipeline.release(work_idx);
  }
}
