// Combine of the splits of a work tile: the last CTA to arrive at the semaphore reduces the
// partials of all splits, in split order. No CTA waits for another.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/atom.cuh"
#include "ptx/ld.cuh"
#include "shared_memory.cuh"
#include "store_rows.cuh"
#include "work_item.cuh"

constexpr int kSplitsPerStep = 8;  // loads in flight

__device__ inline void combine_row(const Params& params, const WorkItem& work, int row, int dim) {
  RowState state = {-kFloatMax, 0.0f};
  float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int first = 0; first < work.num_splits; first += kSplitsPerStep) {
    float2 states[kSplitsPerStep];
    float4 partials[kSplitsPerStep];
#pragma unroll
    for (int i = 0; i < kSplitsPerStep; ++i) {
      // Behind the last split, loads repeat it; the sum below skips them.
      const int slot = partial_slot(params, work, min(first + i, work.num_splits - 1));
      states[i] = ld_global_cg_v2_f32(partial_states(params, slot) + row);
      partials[i] = ld_global_cg_v4_f32(partial_out_ptr(params, slot, row, dim));
    }
    float next = state.row_max;
#pragma unroll
    for (int i = 0; i < kSplitsPerStep; ++i) next = fmaxf(next, states[i].x);
    const float alpha = ex2_approx(state.row_max - next);
    state = {next, state.row_sum * alpha};
    out = make_float4(out.x * alpha, out.y * alpha, out.z * alpha, out.w * alpha);
#pragma unroll
    for (int i = 0; i < kSplitsPerStep; ++i) {
      if (first + i >= work.num_splits) continue;
      const float weight = ex2_approx(states[i].x - next);
      state.row_sum += states[i].y * weight;
      out = add_weighted(out, partials[i], weight);
    }
  }
  store_finished(params, work, row, dim, state, out);
}

// Called by all consumers, each for its kv head, after they have stored the partial of this split.
__device__ inline void combine_splits(const Params& params, const WorkItem& work,
                                      int thread_in_head, SharedMemoryPlan& smem) {
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  if (threadIdx.x == 0) {
    u32* semaphore = params.semaphores + work.first_split_cta;
    const u32 others = static_cast<u32>(work.num_splits - 1);
    const bool is_last = atom_add_acq_rel_gpu(semaphore, 1) == others;
    if (is_last) *semaphore = 0;  // for the next launch
    smem.is_last_split = is_last;
  }
  __syncwarp();
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  if (!smem.is_last_split) return;
  constexpr int kQuads = kHeadDim / 4;
#pragma unroll 1
  for (int vec_idx = thread_in_head; vec_idx < work.rows * kQuads; vec_idx += kThreadsPerHead) {
    combine_row(params, work, vec_idx / kQuads, vec_idx % kQuads * 4);
  }
}
