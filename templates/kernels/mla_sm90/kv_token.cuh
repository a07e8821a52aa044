// A stored KV token: one row of the paged cache.

#pragma once

#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"

struct StoredToken {
  const unsigned char* row;

  // An element of the latent part.
  __device__ float value(int dim) const {
    return cvt_f32(Element{}, reinterpret_cast<const u16*>(row)[dim]);
  }
};

// `page` must exist.
__device__ inline StoredToken stored_token(const Params& params, int page, int slot) {
  const PagedRows rows{params.cache, params.page_stride, params.token_stride};
  return {rows.row_of(page, slot)};
}

// The rope part of a token, which may lie in a separate tensor. A template: dense kernels, which
// load it by TMA, lack these parameters.
template <typename RopeParams>
__device__ inline const unsigned char* stored_rope(const RopeParams& params, int page, int slot) {
  const PagedRows rows{params.rope_cache, params.rope_page_stride, params.rope_token_stride};
  return rows.row_of(page, slot);
}
