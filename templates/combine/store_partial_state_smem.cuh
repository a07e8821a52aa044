// Stores the partial states of a split, one thread per row: they are in shared memory.

#pragma once

#include "accumulators.cuh"
#include "combine/partial.cuh"
#include "combine/reduce_group.cuh"
#include "config.cuh"
#include "shared_memory.cuh"
#include "softmax/row_result.cuh"

__device__ inline void compute_fp16_scales(SharedMemoryPlan& smem, const ReduceGroup&,
                                           const Accumulators&, const ThreadRows& rows,
                                           float (&scales)[kRowsPerThread]) {
  const float* own = &smem.row_scale[rows.stage][row_of(0)];
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group) {
    const float2 pair = *reinterpret_cast<const float2*>(own + group * 8);
    scales[group * 2] = pair.x;
    scales[group * 2 + 1] = pair.y;
  }
}

__device__ inline void store_partial_states(PartialState* target, const ReduceGroup& reduce_group,
                                            const ThreadRows& rows,
                                            const float (&)[kRowsPerThread]) {
  const int row = reduce_group.thread_idx();
  if (row >= kBlockM) return;
  const RowState state = rows.state(row);
  target[row] = {
      state.row_max, state.row_sum, {inverse_of_pow2(rows.smem.row_scale[rows.stage][row])}};
}
static_assert(kNumScales == 1 && kBlockM <= kConsumerThreads / 2,
              "a reduce group has a thread for each row");
