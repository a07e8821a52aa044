// Rows of scales in the cache, and their copies to shared memory. Templates: without scales, Params
// lacks these parameters.

#pragma once

#include "common/paged_kv.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"

// Of K, or of V.
template <typename ScaleParams>
__device__ inline PagedRows scale_rows(const ScaleParams& params, int kv) {
  return kv == 0 ? PagedRows{params.key_scales, params.key_scale_page_stride,
                             params.key_scale_token_stride}
                 : PagedRows{params.value_scales, params.value_scale_page_stride,
                             params.value_scale_token_stride};
}

template <typename ScaleParams>
__device__ inline i64 scale_head_stride(const ScaleParams& params, int kv) {
  return kv == 0 ? params.key_scale_head_stride : params.value_scale_head_stride;
}

// Whether rows are aligned to their size; those of token scales are.
__device__ inline bool has_aligned_scales(const PagedRows& rows, i64 head_stride) {
  const u64 alignment =
      reinterpret_cast<u64>(rows.rows) | rows.page_stride | rows.token_stride | head_stride;
  constexpr int kAlignment = kHasBlockScales ? kScaleRowBytes : 1;
  return alignment % kAlignment == 0;
}

// Copies a row of scales to shared memory, or zeroes it.
template <int kBytes>
__device__ inline void copy_scale_row(u32 target, const void* source, bool exists) {
  const u32 bytes = exists ? kBytes : 0;
  if constexpr (kBytes == 4) cp_async_ca_4(target, source, bytes);
  if constexpr (kBytes == 8) cp_async_ca_8(target, source, bytes);
  if constexpr (kBytes == 16) cp_async_cg_16(target, source, bytes);
}
