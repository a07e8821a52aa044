// What warps tell each other of their rows.

#pragma once

#include "accumulators.cuh"
#include "common/reload_tid.cuh"
#include "output_dims.cuh"
#include "shared_memory.cuh"
#include "softmax/row_state.cuh"

// What a warp tells others of its rows, where it stages output at other times.
__device__ inline float* told_of_rows(SharedMemory& shared, int warp) {
  return reinterpret_cast<float*>(shared.staging[warp]);
}

// Tells of the largest finite magnitude that this warp has of every row.
__device__ inline void tell_largest(SharedMemory& shared, const Accumulators& accumulators) {
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    float own = 0.0f;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float* of = accumulators[tile] + r / 2 * 4 + r % 2;
      own = fmaxf(own, fabsf(nan_unless_finite(of[0])));
      own = fmaxf(own, fabsf(nan_unless_finite(of[2])));
    }
    own = maximum_of_lanes(own);
    if (fresh_lane() < 4) told_of_rows(shared, fresh_warp())[own_row(r)] = own;
  }
}

// Whether the thread of that index in its crew writes what there is of its rows: all warps have the
// same.
__device__ inline bool is_row_writer(int thread) { return thread < 4; }
__device__ inline bool is_scale_writer(int thread) { return thread < 4; }
