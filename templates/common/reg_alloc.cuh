// How many registers a thread has from here on, of 128 that it began with: some roles give what
// others take. By whole warpgroups.

#pragma once

#include "ptx/setmaxnreg.cuh"

template <int kRegs>
__device__ inline void reg_alloc() {
  if constexpr (kRegs < 128) setmaxnreg_dec<kRegs>();
  if constexpr (kRegs > 128) setmaxnreg_inc<kRegs>();
}
