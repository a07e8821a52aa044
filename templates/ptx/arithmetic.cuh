// PTX ISA, "Integer, floating-point and half-precision: add, ex2, fma, max, mul, rcp". Needs sm_53.

#pragma once

#include "common/types.cuh"

// add.rn.f16x2
__device__ inline u32 add_f16x2(u32 a, u32 b) {
  u32 sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

// ex2.approx.ftz.f32
// 2 to the power of x, relative error below 2^-22; minus infinity gives zero.
__device__ inline float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// fma.rn.bf16x2
// Subnormal numbers are kept. Needs sm_80.
__device__ inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// max.f16x2
// Ignores NaN operands. Needs sm_80.
__device__ inline u32 max_f16x2(u32 a, u32 b) {
  u32 larger;
  asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// max.u16x2
// Needs sm_90.
__device__ inline u32 max_u16x2(u32 a, u32 b) {
  u32 larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// mul.rn.f16x2
__device__ inline u32 mul_f16x2(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// rcp.approx.ftz.f32
// 1 / x, relative error below 2^-23; infinity gives zero.
__device__ inline float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
