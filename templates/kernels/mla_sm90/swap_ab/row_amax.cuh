// Row abs-max (amax) of O, swap-AB: reduced over the warps through shared memory.

#pragma once

#include "accumulators.cuh"
#include "combine/reduce_group.cuh"
#include "config.cuh"
#include "shared_memory.cuh"
#include "swap_ab/row_exchange.cuh"

// amax of the finite elements of each row, over all warps of the ReduceGroup.
__device__ inline void row_amax(SharedMemoryPlan& smem, const ReduceGroup& reduce_group,
                                const Accumulators& accumulators, float (&amax)[kRowsPerThread]) {
  store_amax(smem, accumulators);
  reduce_group.sync();
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    amax[r] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kConsumerWarps; ++warp) {
      const float found = amax_smem(smem, warp)[row_of(r)];
      if (reduce_group.has_warp(warp)) amax[r] = fmaxf(amax[r], found);
    }
  }
}
