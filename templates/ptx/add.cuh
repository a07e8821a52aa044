// PTX ISA, "Half Precision Floating Point Instructions: add". Needs sm_53.

#pragma once

#include "common/types.cuh"

// add.rn.f16x2
__device__ inline u32 add_f16x2(u32 a, u32 b) {
  u32 sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}
