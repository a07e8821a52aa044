// A group of consumer warps that cooperates in the split reduction: all consumer warps, or the
// half that owns one half of the accumulators.

#pragma once

#include "common/barriers.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"

// Half of the accumulators that a warp belongs to.
__device__ inline int half_of_warp(int warp) { return warp % 4 / 2; }

struct ReduceGroup {
  int half;  // -1 for all warps

  __device__ int num_threads() const { return half < 0 ? kConsumerThreads : kConsumerThreads / 2; }
  __device__ void sync() const {
    named_barrier_sync(NamedBarrier::PartialsStored + max(half, 0), num_threads());
  }

  // Index of this thread in the group.
  __device__ int thread_idx() const {
    const int warp = reload_warp();
    return half < 0 ? reload_tid() : (warp / 4 * 2 + warp % 2) * kWarpLanes + reload_lane();
  }
  __device__ bool is_leader() const { return thread_idx() == 0; }
  __device__ bool has_warp(int warp) const { return half < 0 || half_of_warp(warp) == half; }
};
