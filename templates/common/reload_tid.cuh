// Indices of this thread as compilers have not seen them: what is computed from them is computed
// where it is used, and takes no register from the products in between. Compilers are told that
// the index is not negative, so that division is a shift.

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
