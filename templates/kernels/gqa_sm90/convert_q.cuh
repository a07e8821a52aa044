// Conversion of Q to the type of the MMA.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "ptx/cvt.cuh"
#include "softmax/online_softmax.cuh"
#include "softmax/value_scaling.cuh"

// Over a dequantized KV cache, a bf16 Q is converted to fp16. A power-of-two scale per row brings
// its amax into range.
constexpr bool kScalesQ = !kIsSame<QueryElement, Element>;

// Exponent of the scale that brings `amax` to 2^14. The scale and its inverse are normal numbers.
__device__ inline int q_scale_exponent(float amax) {
  const int exponent = static_cast<int>(__float_as_uint(amax) >> 23) - 127;
  return 14 - min(max(exponent, -100), 127);
}

// Converts two bf16, times a power of two, to fp16.
__device__ inline u32 bf16x2_to_fp16x2(u32 pair, float scale) {
  return cvt_rn_x2_f32(Fp16{}, cvt_f32(Bf16{}, static_cast<u16>(pair >> 16)) * scale,
                       cvt_f32(Bf16{}, static_cast<u16>(pair)) * scale);
}

// Larger magnitude of two bf16; fmaxf ignores a NaN.
__device__ inline float pair_amax(u32 pair) {
  return fmaxf(fabsf(cvt_f32(Bf16{}, static_cast<u16>(pair))),
               fabsf(cvt_f32(Bf16{}, static_cast<u16>(pair >> 16))));
}

// Converts a lane's fragment of a Q row, in place; returns the inverse of the row's scale.
__device__ inline float convert_q_row(QFragment& row) {
  if constexpr (!kScalesQ) return 1.0f;
  float amax = 0.0f;
#pragma unroll
  for (int k = 0; k < kDimTiles; ++k) {
    amax = fmaxf(amax, fmaxf(pair_amax(row[k].x), pair_amax(row[k].y)));
  }
  const int exponent = q_scale_exponent(quad_reduce_max(amax));
  const float scale = pow2(exponent);
#pragma unroll
  for (int k = 0; k < kDimTiles; ++k) {
    row[k] = make_uint2(bf16x2_to_fp16x2(row[k].x, scale), bf16x2_to_fp16x2(row[k].y, scale));
  }
  return pow2(-exponent);
}
