// FP8 (e4m3) pair conversions in software, for architectures without `cvt.e4m3x2`.

#pragma once

#include "common/types.cuh"
#include "ptx/arithmetic.cuh"

// Read as fp16, the bits of an e4m3 are its value times 2^-8, subnormals included. Only the NaN of
// e4m3 reads as a number and is set here.
__device__ inline u32 fp16x2_of_e4m3x2(u32 pair) {
  const u32 spread = (pair & 0xff) | (pair & 0xff00) << 8;
  const u32 magnitude = (spread & 0x007f007f) << 7;
  const u32 is_nan = (magnitude + 0x00800080) & 0x40004000;
  const u32 nan = (is_nan << 1) - (is_nan >> 14);
  const u32 sign = (spread & 0x00800080) << 8;
  constexpr u32 kTwoTo8 = 0x5c005c00;
  return mul_f16x2(magnitude, kTwoTo8) | sign | nan;
}

// The pair in the upper half of a word.
__device__ inline u32 fp16x2_of_high_e4m3x2(u32 word) { return fp16x2_of_e4m3x2(word >> 16); }

// Rounds to nearest even and saturates at 448.
__device__ inline u32 e4m3_of_f32(float value) {
  const u32 sign = __float_as_uint(value) >> 24 & 0x80;
  const float magnitude = fabsf(value);
  if (!(magnitude <= kInfinity)) return sign | 0x7f;
  constexpr float kMinNormal = 1.0f / 64;
  if (magnitude < kMinNormal) return sign | static_cast<u32>(__float2int_rn(magnitude * 512));
  const u32 bits = __float_as_uint(fminf(magnitude, 448.0f));
  // Rounds the 23 bits of the fraction to 3, and the exponent's bias from 127 to 7.
  const u32 rounded = bits + 0x7ffff + (bits >> 20 & 1);
  return sign | ((rounded >> 20) - (120 << 3));
}

__device__ inline u32 e4m3x2_of_f32(float high, float low) {
  return e4m3_of_f32(low) | e4m3_of_f32(high) << 8;
}
