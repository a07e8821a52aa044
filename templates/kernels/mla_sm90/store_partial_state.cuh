// Partial softmax state (m, l) and fp16 scales of a split's rows, from registers to the workspace.

#pragma once

#include "accumulators.cuh"
#include "combine/partial.cuh"
#include "combine/reduce_group.cuh"
#include "common/reload_tid.cuh"
#include "row_amax.cuh"
#include "shared_memory.cuh"

__device__ inline void compute_fp16_scales(SharedMemoryPlan& smem, const ReduceGroup& reduce_group,
                                           const Accumulators& accumulators, const ThreadRows&,
                                           float (&scales)[kRowsPerThread]) {
  row_amax(smem, reduce_group, accumulators, scales);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) scales[r] = fp16_scale(scales[r]);
}

__device__ inline void store_partial_states(PartialState* target, const ReduceGroup& reduce_group,
                                            const ThreadRows& rows,
                                            const float (&scales)[kRowsPerThread]) {
  const bool writes_state = is_row_writer(reduce_group.thread_idx());
  const bool writes_scale = is_scale_writer(reduce_group.thread_idx());
  const int scale = scale_of_warp(reload_warp());
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    PartialState& row = target[row_of(r)];
    if (writes_state) {
      row.row_max = rows[r].row_max;
      row.row_sum = rows[r].row_sum;
    }
    if (writes_scale) row.scales[scale] = inverse_of_pow2(scales[r]);
  }
}
