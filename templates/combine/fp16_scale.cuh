// Per-row power-of-two scale of partial O in fp16.

#pragma once

#include "common/types.cuh"

// Scales a row whose finite magnitudes are at most `amax` below 2^14: the eleven significant bits
// of fp16 then exceed those of the output. The scale and its inverse are normal numbers.
__device__ inline float fp16_scale(float amax) {
  const int exponent = static_cast<int>(__float_as_uint(amax) >> 23) - 127;
  return __uint_as_float(static_cast<u32>(127 + 13 - max(exponent, -100)) << 23);
}

__device__ inline float inverse_of_pow2(float pow2) {
  return __uint_as_float((254u << 23) - __float_as_uint(pow2));
}
