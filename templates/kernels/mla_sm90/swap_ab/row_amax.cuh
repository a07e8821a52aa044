// Amax of the rows, which all warps share, and the threads that write their states.

#pragma once

#include "accumulators.cuh"
#include "common/barriers.cuh"
#include "common/registers.cuh"
#include "config.cuh"
#include "shared_memory.cuh"
#include "softmax/work_rows.cuh"

// Aliases the output staging buffer of the warp.
__device__ inline float* amax_smem(SharedMemoryPlan& smem, int warp) {
  return reinterpret_cast<float*>(smem.staging[warp]);
}

// Publishes the amax of the finite elements that this warp has of each row.
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

// Whether a thread writes the state, or the scale, of its rows. All warps hold the same rows, so
// the first four threads do.
__device__ inline bool is_row_writer(int thread) { return thread < 4; }
__device__ inline bool is_scale_writer(int thread) { return thread < 4; }

// amax of the finite elements of each row, over all warps.
__device__ inline void row_amax(SharedMemoryPlan& smem, const Accumulators& accumulators,
                                float (&amax)[kRowsPerThread]) {
  store_amax(smem, accumulators);
  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    amax[r] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kPvWarps; ++warp) {
      amax[r] = fmaxf(amax[r], amax_smem(smem, warp)[row_of(r)]);
    }
  }
}
