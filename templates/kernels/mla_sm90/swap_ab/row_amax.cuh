// How large the values of a row are.

#pragma once

#include "accumulators.cuh"
#include "combine/reduce_group.cuh"
#include "config.cuh"
#include "shared_memory.cuh"
#include "swap_ab/row_exchange.cuh"

// The largest finite magnitude of every row, in all warps of the crew.
__device__ inline void largest_of_rows(SharedMemory& shared, const Crew& crew,
                                       const Accumulators& accumulators,
                                       float (&largest)[kOwnRows]) {
  tell_largest(shared, accumulators);
  crew.sync();
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    largest[r] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kConsumerWarps; ++warp) {
      const float found = told_of_rows(shared, warp)[own_row(r)];
      if (crew.has_warp(warp)) largest[r] = fmaxf(largest[r], found);
    }
  }
}
