// Scaling of P by the scales of values, where a cache has one for each token and kv head: P V of a
// token is multiplied by a scale before P is rounded for the PV GEMM.

#pragma once

#include "common/types.cuh"

__device__ inline float pow2(int exponent) {
  return __uint_as_float(static_cast<u32>(exponent + 127) << 23);
}

// Scales are multiplied by a power of two, so that fp16 represents P times a scale: no P exceeds
// 2^8, and no scaled scale 2^7. What is 2^-29 of that is still rounded relatively. Like a row max,
// the exponent moves only where a scale exceeds it; O is multiplied by the same power, and divided
// by it at the end.
struct ValueScaling {
  static constexpr float kMaxScaled = 128.0f;
  static constexpr int kExponentOfMax = 3;  // after a move, that of the largest scale

  int exponent = 126;  // both powers are normal numbers

  // Magnitude of a scale that may move the exponent; others are 0, since each of their elements is
  // infinite or NaN.
  __device__ static float magnitude_of(float scale) {
    return fabsf(scale) < kInfinity ? fabsf(scale) : 0.0f;
  }

  __device__ bool exceeds(float magnitude) const { return magnitude * pow2(exponent) > kMaxScaled; }

  // Moves the exponent for scales of up to `magnitude`; returns the factor of O.
  __device__ float move(float magnitude) {
    const int before = exponent;
    exponent = kExponentOfMax + 127 - static_cast<int>(__float_as_uint(magnitude) >> 23);
    return pow2(max(exponent - before, -126));
  }

  __device__ float scaled(float scale) const { return scale * pow2(exponent); }
  __device__ float inverse() const { return pow2(-exponent); }
};
