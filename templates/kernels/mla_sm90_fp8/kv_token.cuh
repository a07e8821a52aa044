// A stored KV token: one row of the paged FP8 KV cache.

#pragma once

#include "common/fp8.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "ptx/cvt.cuh"

struct StoredToken {
  const unsigned char* row;

  // An element of the latent part.
  __device__ float value(int dim) const {
    return cvt_f32(Fp16{}, static_cast<u16>(fp16x2_of_e4m3x2(row[dim])));
  }
};

// `page` must exist.
__device__ inline StoredToken stored_token(const Params& params, int page, int slot) {
  const PagedRows rows{params.cache, params.page_stride, params.token_stride};
  return {rows.row_of(page, slot)};
}
