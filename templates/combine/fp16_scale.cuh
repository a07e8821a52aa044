// What values of a row are multiplied by to be left as halves.

#pragma once

#include "common/types.cuh"

// The power of two that brings what is finite of a row, `amax` at the most, below 2^14: the
// eleven bits of a half then tell more of a value than the output will. Both it and its inverse are
// normal numbers.
__device__ inline float fp16_scale(float amax) {
  const int exponent = static_cast<int>(__float_as_uint(amax) >> 23) - 127;
  return __uint_as_float(static_cast<u32>(127 + 13 - max(exponent, -100)) << 23);
}

__device__ inline float inverse_of_pow2(float pow2) {
  return __uint_as_float((254u << 23) - __float_as_uint(pow2));
}
