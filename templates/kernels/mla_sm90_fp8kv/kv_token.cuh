// A token as it lies in the cache: converted to elements by scales.

#pragma once

#include "common/fp8.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"

// Its row, or the latent part of it, and its scales: in the row, in a tensor of their own, or one
// number for all.
struct StoredToken {
  const unsigned char* row;
  const float* scales;  // one for each 128 latent dims, or for all
  float latent_scale;  // where there are none

  // Of the latent dims from 128 * `step` on.
  __device__ float scale(int step) const {
    return scales == nullptr ? latent_scale : scales[kHasOneScale ? 0 : step];
  }

  // One of its values.
  __device__ u16 element(int dim) const {
    const u32 fp16x2 = fp16x2_of_e4m3x2(row[dim]);
    const float value = cvt_f32(Fp16{}, static_cast<u16>(fp16x2));
    return static_cast<u16>(cvt_rn_x2_f32(Element{}, 0.0f, value * scale(dim / kScaledDims)));
  }
};

// The token in `slot` of `page`, which exists.
__device__ inline StoredToken stored_token(const Params& params, int page, int slot) {
  const PagedRows rows{params.cache, params.page_stride, params.token_stride};
  const unsigned char* row = rows.row_of(page, slot);
  if constexpr (kHasInnerScales) {
    return {row, reinterpret_cast<const float*>(row + kLatentDim), 1.0f};
  }
  const i64 first = page * params.scale_page_stride + slot * params.scale_token_stride;
  return {row, params.kv_scales == nullptr ? nullptr : params.kv_scales + first,
          params.latent_scale};
}

// Its rope part, where that may be a tensor of its own.
__device__ inline const unsigned char* stored_rope(const Params& params, int page, int slot) {
  const PagedRows rows{params.rope_cache, params.rope_page_stride, params.rope_token_stride};
  return rows.row_of(page, slot);
}
