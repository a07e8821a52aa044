// A stored KV token: one row of the paged FP8 KV cache, with its scales.

#pragma once

#include "common/fp8.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"

// The latent part of a row, and its scales: in the row, in a separate tensor, or one for the cache.
struct StoredToken {
  const unsigned char* row;
  const float* scales;  // one per 128 latent dims, or one per token
  float latent_scale;  // of the cache, if `scales` is null

  // Scale of the latent dims from 128 * `step` on.
  __device__ float scale(int step) const {
    return scales == nullptr ? latent_scale : scales[kHasPerTokenScale ? 0 : step];
  }

  // A dequantized element of the latent part, rounded as the output is.
  __device__ float value(int dim) const {
    const float stored = cvt_f32(Fp16{}, static_cast<u16>(fp16x2_of_e4m3x2(row[dim])));
    const u32 rounded = cvt_rn_x2_f32(Element{}, 0.0f, stored * scale(dim / kScaledDims));
    return cvt_f32(Element{}, static_cast<u16>(rounded));
  }
};

// `page` must exist.
__device__ inline StoredToken stored_token(const Params& params, int page, int slot) {
  const PagedRows rows{params.cache, params.page_stride, params.token_stride};
  const unsigned char* row = rows.row_of(page, slot);
  if constexpr (kHasInlineScales) {
    return {row, reinterpret_cast<const float*>(row + kLatentDim), 1.0f};
  }
  const i64 first = page * params.scale_page_stride + slot * params.scale_token_stride;
  return {row, params.kv_scales == nullptr ? nullptr : params.kv_scales + first,
          params.latent_scale};
}

// The rope part of a token, which may lie in a separate tensor.
__device__ inline const unsigned char* stored_rope(const Params& params, int page, int slot) {
  const PagedRows rows{params.rope_cache, params.rope_page_stride, params.rope_token_stride};
  return rows.row_of(page, slot);
}
