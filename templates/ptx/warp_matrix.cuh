// PTX ISA, "Warp Level Matrix Instructions: ldmatrix, mma, movmatrix, stmatrix". Needs sm_80.
// Lanes 8i to 8i + 7 give the shared-memory addresses of the eight 16-byte rows of matrix i of
// ldmatrix and stmatrix, of which word i is this lane's fragment.
// mma: d[16, 8] += a[16, 16] * b[16, 8]. A lane holds, with g = lane / 4 and c = lane % 4:
// d: rows g (0, 1) and g + 8 (2, 3), columns 2c and 2c + 1; a: two elements a word, rows g, g + 8,
// g, g + 8, columns 2c.. of the first (0, 1) and second (2, 3) half; b: rows 2c.. of each half,
// column g.

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

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
__device__ inline void mma_m16n8k16(Bf16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
__device__ inline void mma_m16n8k16(Fp16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// movmatrix.sync.aligned.m8n8.trans.b16
// Transposes the matrix of which `a` is this lane's fragment.
__device__ inline u32 movmatrix_trans(u32 a) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// stmatrix.sync.aligned.m8n8.x4.shared.b16
// Needs sm_90.
__device__ inline void stmatrix_x4(u32 row_address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(a),
      "r"(b), "r"(c), "r"(d)
      : "memory");
}

// stmatrix.sync.aligned.m8n8.x4.trans.shared.b16
// Needs sm_90.
__device__ inline void stmatrix_x4_trans(u32 row_address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}
