// Register reallocation between warpgroups (`setmaxnreg`): producer warpgroups release what
// consumer warpgroups acquire, from 128 registers per thread on, or a little more. Executed by
// whole warpgroups.

#pragma once

#include "ptx/setmaxnreg.cuh"

template <int kRegs>
__device__ inline void reg_alloc() {
  if constexpr (kRegs < 128) setmaxnreg_dec<kRegs>();
  if constexpr (kRegs > 128) setmaxnreg_inc<kRegs>();
}
