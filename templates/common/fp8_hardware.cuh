// FP8 (e4m3) pair conversions by `cvt`.

#pragma once

#include "common/types.cuh"
#include "ptx/cvt.cuh"

__device__ inline u32 fp16x2_of_e4m3x2(u32 pair) {
  return cvt_rn_f16x2_e4m3x2(static_cast<u16>(pair));
}

// The pair in the upper half of a word.
__device__ inline u32 fp16x2_of_high_e4m3x2(u32 word) { return cvt_rn_f16x2_e4m3x2_high(word); }

__device__ inline u32 e4m3x2_of_f32(float high, float low) {
  return cvt_rn_satfinite_e4m3x2_f32(high, low);
}
