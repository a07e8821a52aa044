// PTX ISA, "Warp Level Matrix Instructions: movmatrix". Needs sm_75.

#pragma once

#include "common/types.cuh"

// movmatrix.sync.aligned.m8n8.trans.b16
// Transposes the matrix of which `a` is this lane's fragment.
__device__ inline u32 movmatrix_trans(u32 a) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
