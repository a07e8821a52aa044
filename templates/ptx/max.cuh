// PTX ISA, "Half Precision Floating Point Instructions: max". Needs sm_80.

#pragma once

#include "common/types.cuh"

// max.f16x2
// Ignores NaN operands.
__device__ inline u32 max_f16x2(u32 a, u32 b) {
  u32 larger;
  asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
