// How long lines of a cache stay in L2. What nobody reads again leaves first, so that queries
// stay, and outputs need not be written out between reads, which costs memory far more than
// their bytes.

#pragma once

#include "common/types.cuh"
#include "ptx/createpolicy.cuh"

__device__ inline u64 kv_cache_hint(bool is_shared) {
  return is_shared ? createpolicy_evict_normal() : createpolicy_evict_first();
}
