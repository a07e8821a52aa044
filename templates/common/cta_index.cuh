// What a CTA of a one-dimensional grid takes of each dimension of the work.

#pragma once

#include "common/types.cuh"

// The index of a CTA, of which `next` takes the fastest dimension first. Unsigned, because a signed
// division takes more instructions; most dimensions are 1.
struct CtaIndex {
  u32 rest = blockIdx.x;

  __device__ int next(int count) {
    if (count == 1) return 0;
    const u32 quotient = rest / static_cast<u32>(count);
    const u32 index = rest - quotient * static_cast<u32>(count);
    rest = quotient;
    return static_cast<int>(index);
  }
};
