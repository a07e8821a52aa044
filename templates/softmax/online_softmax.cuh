// Online softmax: the scale of the scores, the rescale threshold, and reductions over the quad of
// lanes that hold a row of an MMA accumulator.

#pragma once

#include "common/params.cuh"

// Factor of the scores Q K^T, natural base.
__device__ inline float score_scale(const Params& params) {
  const float scale = value_of(params.bmm1_scale_tensor, params.bmm1_scale);
  return params.bmm2_scales_scores ? scale * value_of(params.bmm2_scale_tensor, params.bmm2_scale)
                                   : scale;
}

// Rescale threshold (FA4 "conditional rescaling"): P is relative to a stale row max, which moves
// only when a score exceeds it by this much (base-2 exponent). Warps then need no common max per
// tile, O is rarely rescaled, and no element of P exceeds 2^8, which fp16 represents.
constexpr float kRescaleThreshold = 8.0f;

__device__ inline float quad_reduce_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float quad_reduce_min(float value) {
  value = fminf(value, __shfl_xor_sync(~0u, value, 1));
  return fminf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float quad_reduce_sum(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}
