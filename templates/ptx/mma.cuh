// PTX ISA, "Warp Level Matrix Instructions: mma". Needs sm_80.
// d[16, 8] += a[16, 16] * b[16, 8]. A lane holds, with g = lane / 4 and c = lane % 4:
// d: rows g (0, 1) and g + 8 (2, 3), columns 2c and 2c + 1; a: two elements a word, rows g, g + 8,
// g, g + 8, columns 2c.. of the first (0, 1) and second (2, 3) half; b: rows 2c.. of each half,
// column g.

#pragma once

#include "common/types.cuh"

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
