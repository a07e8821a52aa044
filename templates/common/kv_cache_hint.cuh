// L2 eviction hints for KV loads: evict-first when no other CTA reads the tile, evict-normal
// otherwise. Keeps Q and partial O resident and avoids write-backs between reads, which cost
// far more bandwidth than their bytes.

#pragma once

#include "common/types.cuh"
#include "ptx/createpolicy.cuh"

__device__ inline u64 kv_cache_hint(bool is_shared) {
  return is_shared ? createpolicy_evict_normal() : createpolicy_evict_first();
}
