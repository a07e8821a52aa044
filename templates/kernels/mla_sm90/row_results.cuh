// Results of the rows in registers: normalization factors and LSE, the fp16 scales and the partial
// softmax states of a split.

#pragma once

#include "accumulators.cuh"
#include "combine/partial.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "row_amax.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/row_state.cuh"
#include "softmax/work_rows.cuh"
#include "thread_rows.cuh"

// Normalization factors of this thread's rows. One thread of those that hold a row stores its LSE.
__device__ inline void compute_row_factors(const Params& params, const WorkItem& work,
                                           const ThreadRows& rows, bool writes_lse,
                                           float (&factors)[kRowsPerThread]) {
  const float scale = output_scale(params);
  float sinks[kRowsPerThread];
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) sinks[r] = -kInfinity;
  if (params.sinks != nullptr) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) sinks[r] = sink_of(params, work, row_of(r));
  }
  float lse[kRowsPerThread];
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const RowResult result = result_of(params, rows[r], sinks[r]);
    factors[r] = result.factor * scale;
    lse[r] = result.lse;
  }
  if (params.lse == nullptr || !writes_lse) return;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int row = row_of(r);
    if (row < work.rows) params.lse[global_row(params, work, row)] = lse[r];
  }
}

__device__ inline void compute_fp16_scales(SharedMemoryPlan& smem, const Accumulators& accumulators,
                                           const ThreadRows&, float (&scales)[kRowsPerThread]) {
  row_amax(smem, accumulators, scales);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) scales[r] = fp16_scale(scales[r]);
}

// Of a pairwise combine.
struct RowPairs {
  PairWeights weights[kRowsPerThread];

  __device__ RowPairs(const Params&, const WorkItem&, const CombineSmem&,
                      const PartialState* others, ThreadRows& rows) {
    const int scale = scale_of_warp(reload_warp());
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      weights[r] = combine_pair_states(rows[r], others + row_of(r), scale);
    }
  }

  __device__ PairWeights operator[](int r) const { return weights[r]; }
};

__device__ inline void store_partial_states(PartialState* target, const ThreadRows& rows,
                                            const float (&scales)[kRowsPerThread]) {
  const bool writes_state = is_row_writer(reload_tid());
  const bool writes_scale = is_scale_writer(reload_tid());
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
