// Named barriers of a CTA: `config.cuh` enumerates them by the fact they announce. Barrier 0 is
// __syncthreads.

#pragma once

#include "config.cuh"
#include "ptx/barrier.cuh"

// `threads` counts those that wait and those that only arrive.
__device__ inline void named_barrier_sync(NamedBarrier barrier, int threads) {
  barrier_sync(static_cast<int>(barrier), threads);
}

__device__ inline void named_barrier_arrive(NamedBarrier barrier, int threads) {
  barrier_arrive(static_cast<int>(barrier), threads);
}

// Returns whether any thread passes true.
__device__ inline bool named_barrier_sync_or(NamedBarrier barrier, int threads, bool value) {
  return barrier_red_or(static_cast<int>(barrier), threads, value) != 0;
}

// The barrier `index` places behind one that has several: one for each stage, or for each half.
__device__ constexpr NamedBarrier operator+(NamedBarrier barrier, int index) {
  return static_cast<NamedBarrier>(static_cast<int>(barrier) + index);
}
