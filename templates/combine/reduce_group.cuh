// Consumer warps that leave or merge pieces of a unit together: all, or those of one half of the
// tasks.

#pragma once

#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/barrier.cuh"

// Which half the tasks of a warp belong to.
__device__ inline int half_of_warp(int warp) { return warp % 4 / 2; }

struct ReduceGroup {
  int half;  // minus one for all

  __device__ int num_threads() const { return half < 0 ? kConsumerThreads : kConsumerThreads / 2; }
  __device__ void sync() const { barrier_sync(kReduceBarrier + max(half, 0), num_threads()); }

  // Index of this thread in the crew.
  __device__ int thread_idx() const {
    const int warp = reload_warp();
    return half < 0 ? reload_tid() : (warp / 4 * 2 + warp % 2) * kWarpLanes + reload_lane();
  }
  __device__ bool is_leader() const { return thread_idx() == 0; }
  __device__ bool has_warp(int warp) const { return half < 0 || half_of_warp(warp) == half; }
};
