// A stored KV token: one row of the paged FP8 KV cache.

#pragma once

#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"

struct StoredToken {
  const unsigned char* row;

  __device__ u16 element(int dim) const { return row[dim]; }
};

// `page` must exist.
__device__ inline StoredToken stored_token(const Params& params, int page, int slot) {
  const PagedRows rows{params.cache, params.page_stride, params.token_stride};
  return {rows.row_of(page, slot)};
}
