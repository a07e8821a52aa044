// PTX ISA, "Half Precision Floating Point Instructions: mul". Needs sm_53.

#pragma once

#include "common/types.cuh"

// mul.rn.f16x2
__device__ inline u32 mul_f16x2(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
