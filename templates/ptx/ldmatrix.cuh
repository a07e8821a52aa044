// PTX ISA, "Warp Level Matrix Instructions: ldmatrix". Needs sm_75.
// Lanes 8i to 8i + 7 give the shared-memory addresses of the eight 16-byte rows of matrix i;
// word i of the result is this lane's fragment of matrix i.

#pragma once

#include "common/types.cuh"

// ldmatrix.sync.aligned.m8n8.x4.shared.b16
__device__ inline void ldmatrix_x4(u32 (&d)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row_address)
               : "memory");
}

// ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16
__device__ inline void ldmatrix_x4_trans(u32 (&d)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row_address)
               : "memory");
}
