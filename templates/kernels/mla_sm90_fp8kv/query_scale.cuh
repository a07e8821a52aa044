// Scale of a 16-bit query row.

#pragma once

#include "common/types.cuh"

// Scale of a row: the power of two that the row is divided by, so that its amax is below 256; and
// the inverse, which is NaN for a row with NaN or Inf.
struct QScale {
  float scale;
  float inv_scale;

  // `amax` is the largest magnitude, as bf16 bits.
  __device__ explicit QScale(u32 amax) {
    constexpr u32 kNan = 0xff;
    const u32 exponent = max(amax >> 7, 8u);  // both are normal numbers
    scale = __uint_as_float((exponent - 7) << 23);
    inv_scale = __uint_as_float(exponent == kNan ? 0x7fffffff : (261 - exponent) << 23);
  }
};
