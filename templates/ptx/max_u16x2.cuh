// PTX ISA, "Integer Arithmetic Instructions: max". Needs sm_90.

#pragma once

#include "common/types.cuh"

// max.u16x2
__device__ inline u32 max_u16x2(u32 a, u32 b) {
  u32 larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
