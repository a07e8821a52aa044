// Consumer warps that leave or merge pieces of a unit together: all, or those of one half of the
// tasks.

#pragma once

#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/barrier.cuh"

// Which half the tasks of a warp belong to.
__device__ inline int half_of_warp(int warp) { return warp % 4 / 2; }

struct Crew {
  int half;  // minus one for all

  __device__ int threads() const { return half < 0 ? kConsumerThreads : kConsumerThreads / 2; }
  __device__ void sync() const { barrier_sync(kCrewBarrier + max(half, 0), threads()); }

  // Index of this thread in the crew.
  __device__ int thread() const {
    const int warp = fresh_warp();
    return half < 0 ? fresh_thread() : (warp / 4 * 2 + warp % 2) * kWarpLanes + fresh_lane();
  }
  __device__ bool is_leader() const { return thread() == 0; }
  __device__ bool has_warp(int warp) const { return half < 0 || half_of_warp(warp) == half; }
};
