// Merging the pieces of a unit: the block that comes last adds up what all have left, in the
// order of the pieces. Nobody waits.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/atom.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ex2.cuh"
#include "ptx/ld.cuh"
#include "shared_memory.cuh"
#include "store_rows.cuh"
#include "tile_scheduler.cuh"

constexpr int kSplitsPerStep = 8;  // that are under way together

__device__ inline void combine_row(const Params& params, const WorkItem& work, int row, int dim) {
  RowState state = {-kFloatMax, 0.0f};
  float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int first = 0; first < work.num_splits; first += kSplitsPerStep) {
    float2 states[kSplitsPerStep];
    float4 partials[kSplitsPerStep];
#pragma unroll
    for (int i = 0; i < kSplitsPerStep; ++i) {
      // Behind the last piece it comes once more, and counts for nothing.
      const int slot = partial_slot(params, work, min(first + i, work.num_splits - 1));
      states[i] = ld_global_cg_v2_f32(partial_states(params, slot) + row);
      partials[i] = ld_global_cg_v4_f32(partial_values(params, slot, row, dim));
    }
    float next = state.row_max;
#pragma unroll
    for (int i = 0; i < kSplitsPerStep; ++i) next = fmaxf(next, states[i].x);
    const float before = ex2_approx(state.row_max - next);
    state = {next, state.row_sum * before};
    values =
        make_float4(values.x * before, values.y * before, values.z * before, values.w * before);
#pragma unroll
    for (int i = 0; i < kSplitsPerStep; ++i) {
      if (first + i >= work.num_splits) continue;
      const float weight = ex2_approx(states[i].x - next);
      state.row_sum += states[i].y * weight;
      values = add_weighted(values, partials[i], weight);
    }
  }
  store_finished(params, work, row, dim, state, values);
}

// By all consumers, each of its head, after all have left their part of this piece.
__device__ inline void combine_splits(const Params& params, const WorkItem& work, int head_thread,
                                      SharedMemoryPlan& smem) {
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  if (threadIdx.x == 0) {
    u32* semaphore = params.semaphores + work.first_split_cta;
    const u32 others = static_cast<u32>(work.num_splits - 1);
    const bool is_last = atom_add_acq_rel_gpu(semaphore, 1) == others;
    if (is_last) *semaphore = 0;  // for the next launch
    smem.is_last_split = is_last;
  }
  __syncwarp();
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  if (!smem.is_last_split) return;
  constexpr int kQuads = kHeadDim / 4;
#pragma unroll 1
  for (int vec_idx = head_thread; vec_idx < work.rows * kQuads; vec_idx += kHeadThreads) {
    combine_row(params, work, vec_idx / kQuads, vec_idx % kQuads * 4);
  }
}
