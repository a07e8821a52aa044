// Coordinates of a CTA in a linearized grid.

#pragma once

#include "common/types.cuh"

// Decomposes `blockIdx.x`, the fastest dimension first. An unsigned division takes fewer
// instructions than a signed one, and most dimensions are 1.
struct CtaIndex {
  u32 rest = blockIdx.x;

  __device__ int next(int count) {
    if (count == 1) return 0;
    const u32 quotient = rest / static_cast<u32>(count);
    const u32 index = rest - quotient * static_cast<u32>(count);
    rest = quotient;
    return static_cast<int>(index);
  }

  // The slowest dimension.
  __device__ int last() const { return static_cast<int>(rest); }
};
