// Division of the split reduction: the sub-tile that a reducing CTA reduces, and the group of
// PV warps that cooperates.

#pragma once

#include "common/barriers.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"

// Sub-tiles balance the reducers: whole groups of four fragments, which one warp sums together
// because they share their rows, or with many reducers a part of one group.
constexpr int kFragsPerStep = 4;

// Unsigned, because that division is shorter.
__device__ constexpr int frags_per_subtile(u32 num_reducers) {
  const int frags = static_cast<int>((kNumFrags + num_reducers - 1) / num_reducers);
  return frags < 3 ? frags : ceil_div(frags, kFragsPerStep) * kFragsPerStep;
}

// Half of the accumulators that a warp belongs to.
__device__ inline int half_of_warp(int warp) { return warp % 4 / 2; }

// All PV warps, or the half that owns one half of the accumulators.
struct ReduceGroup {
  int half;  // -1 for all warps

  __device__ int num_threads() const { return half < 0 ? kPvThreads : kPvThreads / 2; }
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
