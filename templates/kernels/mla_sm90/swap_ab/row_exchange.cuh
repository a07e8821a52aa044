// What warps tell each other of their rows.

#pragma once

#include "accumulators.cuh"
#include "common/reload_tid.cuh"
#include "output_dims.cuh"
#include "shared_memory.cuh"
#include "softmax/row_state.cuh"

// What a warp tells others of its rows, where it stages output at other times.
__device__ inline float* amax_smem(SharedMemoryPlan& smem, int warp) {
  return reinterpret_cast<float*>(smem.staging[warp]);
}

// Tells of the largest finite magnitude that this warp has of every row.
__device__ inline void store_amax(SharedMemoryPlan& smem, const Accumulators& accumulators) {
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    float amax = 0.0f;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float* acc = accumulators[tile] + r / 2 * 4 + r % 2;
      amax = fmaxf(amax, fabsf(nan_unless_finite(acc[0])));
      amax = fmaxf(amax, fabsf(nan_unless_finite(acc[2])));
    }
    amax = max_over_lanes(amax);
    if (reload_lane() < 4) amax_smem(smem, reload_warp())[row_of(r)] = amax;
  }
}

// Whether the thread of that index in its crew writes what there is of its rows: all warps have the
// same.
__device__ inline bool is_row_writer(int thread) { return thread < 4; }
__device__ inline bool is_scale_writer(int thread) { return thread < 4; }
