// How many registers a thread has from here on, of 128 that it began with: some roles give what
// others take. By whole warpgroups.

#pragma once

#include "ptx/setmaxnreg.cuh"

template <int kCount>
__device__ inline void set_registers() {
  if constexpr (kCount < 128) setmaxnreg_dec<kCount>();
  if constexpr (kCount > 128) setmaxnreg_inc<kCount>();
}
