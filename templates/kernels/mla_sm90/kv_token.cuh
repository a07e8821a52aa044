// A token as it lies in the cache.

#pragma once

#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"

struct StoredToken {
  const unsigned char* row;

  // One of its values.
  __device__ u16 element(int dim) const { return reinterpret_cast<const u16*>(row)[dim]; }
};

// The token in `slot` of `page`, which exists.
__device__ inline StoredToken stored_token(const Params& params, int page, int slot) {
  const PagedRows rows{params.cache, params.page_stride, params.token_stride};
  return {rows.row_of(page, slot)};
}
