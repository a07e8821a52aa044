// PTX ISA, "Warp Level Matrix Instructions: stmatrix". Needs sm_90.
// Lanes 8i to 8i + 7 give the shared-memory addresses of the eight 16-byte rows of matrix i, of
// which word i is this lane's fragment.

#pragma once

#include "common/types.cuh"

// stmatrix.sync.aligned.m8n8.x4.shared.b16
__device__ inline void stmatrix_x4(u32 row_address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(a),
      "r"(b), "r"(c), "r"(d)
      : "memory");
}

// stmatrix.sync.aligned.m8n8.x4.trans.shared.b16
__device__ inline void stmatrix_x4_trans(u32 row_address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}
