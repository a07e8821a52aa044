// Re-reads `%tid.x` through volatile assembly to cut live ranges: values derived from it are
// recomputed at their use instead of holding registers across the MMAs. The index is assumed
// non-negative, so that division becomes a shift.

#pragma once

#include "common/types.cuh"
#include "ptx/mov.cuh"

__device__ inline int reload_tid() {
  const int thread = static_cast<int>(mov_tid_x());
  __builtin_assume(thread >= 0);
  return thread;
}
__device__ inline int reload_lane() { return reload_tid() % kWarpLanes; }
__device__ inline int reload_warp() { return reload_tid() / kWarpLanes; }
