// Amax of the rows, of which each warpgroup has a half, and the threads that write their states.

#pragma once

#include "accumulators.cuh"
#include "common/registers.cuh"
#include "config.cuh"
#include "shared_memory.cuh"
#include "softmax/online_softmax.cuh"
#include "softmax/work_rows.cuh"

// amax of the finite elements of each row, by four independent chains: each max depends on the one
// before it in its chain.
__device__ inline void row_amax(SharedMemoryPlan&, const Accumulators& accumulators,
                                float (&amax)[kRowsPerThread]) {
  constexpr int kChains = 4;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    float chains[kChains] = {};
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      const float* acc = accumulators + i * 4 + r * 2;
      float& chain = chains[i % kChains];
      const float low = nan_unless_finite(acc[0]);
      const float high = nan_unless_finite(acc[1]);
      chain = fmaxf(chain, fmaxf(fabsf(low), fabsf(high)));
    }
    amax[r] = quad_reduce_max(fmaxf(fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3])));
  }
}

// Whether this thread writes the state of its rows, and the scale of its half of them.
__device__ inline bool is_row_writer(int) { return reload_tid() < 128 && reload_lane() % 4 == 0; }
__device__ inline bool is_scale_writer(int) { return reload_lane() % 4 == 0; }
