// Registers of a warp: fewer live values, uniform values, and reallocation between warpgroups.

#pragma once

#include "common/types.cuh"
#include "ptx/mov.cuh"
#include "ptx/setmaxnreg.cuh"

// Re-reads `%tid.x` through volatile assembly to cut live ranges: values derived from it are
// recomputed at their use instead of holding registers across the MMAs. The index is assumed
// non-negative, so that division becomes a shift.
__device__ inline int reload_tid() {
  const int thread = static_cast<int>(mov_tid_x());
  __builtin_assume(thread >= 0);
  return thread;
}
__device__ inline int reload_lane() { return reload_tid() % kWarpLanes; }
__device__ inline int reload_warp() { return reload_tid() / kWarpLanes; }

// A value that is equal in all lanes, and known to the compiler to be so. Values derived from it
// live in uniform registers, where wgmma takes its descriptors from.
__device__ inline u32 warp_uniform(u32 value) { return __reduce_max_sync(~0u, value); }

// Register reallocation between warpgroups (`setmaxnreg`): producer warpgroups release what
// consumer warpgroups acquire, from 128 registers per thread on, or a little more. Executed by
// whole warpgroups.
template <int kRegs>
__device__ inline void reg_alloc() {
  if constexpr (kRegs < 128) setmaxnreg_dec<kRegs>();
  if constexpr (kRegs > 128) setmaxnreg_inc<kRegs>();
}
