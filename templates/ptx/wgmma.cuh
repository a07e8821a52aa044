// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: wgmma". Needs sm_90.
// d[64, N] = a[64, K] * b[K, N], plus d if `accumulates`, by four warps with 16 rows of d each. K
// is 16, or 32 in FP8 (e4m3), whose accumulation keeps few bits and truncates below them. A lane
// holds, with g = lane / 4 and c = lane % 4: of d rows g (0, 1) and g + 8 (2, 3), columns 8j + 2c,
// in words 4j and after; of a in registers two elements a word, as of mma, or four in FP8.
// Descriptors give the layout of operands in shared memory: K-major unless they are transposed.

#pragma once

#include "common/types.cuh"

// wgmma.fence.sync.aligned
// Orders accesses of registers before the wgmma that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group.sync.aligned
__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group.sync.aligned
// Waits until at most `kPending` of this warp's newest groups are in flight.
template <int kPending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Compiler fence of accumulators: reads stay after the preceding wait, and writes before the next
// wgmma (CUTLASS warpgroup_fence_operand); no instruction.
template <int kCount>
__device__ inline void wgmma_fence_operand(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Compiler fence of an operand in registers: its writes stay before the next wgmma.fence; no
// instruction.
template <int kCount>
__device__ inline void wgmma_fence_operand(u32 (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// An MMA spells out all registers of d. D8 names those of d[8] in the assembly, where they come
// first, and REGISTERS_8 passes them. The numbers are those of the operands behind d, which begin
// at %N for d[N]: a, b and `accumulates`.
#define D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define D16 D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define D32 D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D128                                                                                       \
  D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, "    \
      "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, " \
      "%67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
      "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, "    \
      "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, " \
      "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define REGISTERS_8(i)                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define REGISTERS_16(i) REGISTERS_8(i), REGISTERS_8(i + 8)
#define REGISTERS_32(i) REGISTERS_16(i), REGISTERS_16(i + 16)
#define REGISTERS_128(i) \
  REGISTERS_32(i), REGISTERS_32(i + 32), REGISTERS_32(i + 64), REGISTERS_32(i + 96)
#define WGMMA_SHARED(instruction, n, b_at, accumulates_at, transposed)                         \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #accumulates_at ", 0; " instruction " {" D##n \
               "}, %" #n ", %" #b_at ", p, 1, 1" transposed ";}"                               \
               : REGISTERS_##n(0)                                                              \
               : "l"(a), "l"(b), "r"(accumulates))
#define WGMMA_REGISTERS(instruction, n, a1, a2, a3, b_at, accumulates_at, transposed)            \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #accumulates_at ", 0; " instruction " {" D##n   \
               "}, {%" #n ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_at ", p, 1, 1" transposed ";}" \
               : REGISTERS_##n(0)                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulates))

// wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16
__device__ inline void wgmma_mma(Bf16, float (&d)[8], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16", 8, 9, 10, ", 0, 0");
}

// wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16
// `a` is M-major (transposed).
__device__ inline void wgmma_mma_trans_a(Bf16, float (&d)[8], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16", 8, 9, 10, ", 1, 0");
}

// wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16
__device__ inline void wgmma_mma(Bf16, float (&d)[16], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16", 16, 17, 18, ", 0, 0");
}

// wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16
// `a` is M-major (transposed).
__device__ inline void wgmma_mma_trans_a(Bf16, float (&d)[16], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16", 16, 17, 18, ", 1, 0");
}

// wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16
__device__ inline void wgmma_mma(Bf16, float (&d)[32], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", 32, 33, 34, ", 0, 0");
}

// wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16
// `b` is N-major (transposed).
__device__ inline void wgmma_mma_trans_b(Bf16, float (&d)[128], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", 128, 129, 130, ", 0, 1");
}

// wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16
// `a` is in registers; `b` is N-major (transposed).
__device__ inline void wgmma_mma_trans_b(Bf16, float (&d)[128], const u32* a, u64 b,
                                         int accumulates) {
  WGMMA_REGISTERS("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", 128, 129, 130, 131, 132,
                  133, ", 1");
}

// wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16
__device__ inline void wgmma_mma(Fp16, float (&d)[8], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16", 8, 9, 10, ", 0, 0");
}

// wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16
// `a` is M-major (transposed).
__device__ inline void wgmma_mma_trans_a(Fp16, float (&d)[8], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16", 8, 9, 10, ", 1, 0");
}

// wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16
__device__ inline void wgmma_mma(Fp16, float (&d)[16], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16", 16, 17, 18, ", 0, 0");
}

// wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16
// `a` is M-major (transposed).
__device__ inline void wgmma_mma_trans_a(Fp16, float (&d)[16], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16", 16, 17, 18, ", 1, 0");
}

// wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16
__device__ inline void wgmma_mma(Fp16, float (&d)[32], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16", 32, 33, 34, ", 0, 0");
}

// wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16
// `b` is N-major (transposed).
__device__ inline void wgmma_mma_trans_b(Fp16, float (&d)[128], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16", 128, 129, 130, ", 0, 1");
}

// wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16
// `a` is in registers; `b` is N-major (transposed).
__device__ inline void wgmma_mma_trans_b(Fp16, float (&d)[128], const u32* a, u64 b,
                                         int accumulates) {
  WGMMA_REGISTERS("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16", 128, 129, 130, 131, 132,
                  133, ", 1");
}

// wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16
// `a` is in registers.
__device__ inline void wgmma_mma(Fp16, float (&d)[8], const u32* a, u64 b, int accumulates) {
  WGMMA_REGISTERS("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16", 8, 9, 10, 11, 12, 13,
                  ", 0");
}

// wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16
// `a` is in registers.
__device__ inline void wgmma_mma(Fp16, float (&d)[16], const u32* a, u64 b, int accumulates) {
  WGMMA_REGISTERS("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16", 16, 17, 18, 19, 20, 21,
                  ", 0");
}

// wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16
// `a` is in registers.
__device__ inline void wgmma_mma(Fp16, float (&d)[32], const u32* a, u64 b, int accumulates) {
  WGMMA_REGISTERS("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16", 32, 33, 34, 35, 36, 37,
                  ", 0");
}

// wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3
__device__ inline void wgmma_mma(E4m3, float (&d)[8], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3", 8, 9, 10, "");
}

// wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3
__device__ inline void wgmma_mma(E4m3, float (&d)[16], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3", 16, 17, 18, "");
}

// wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3
__device__ inline void wgmma_mma(E4m3, float (&d)[32], u64 a, u64 b, int accumulates) {
  WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3", 32, 33, 34, "");
}

// wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3
// `a` is in registers.
__device__ inline void wgmma_mma(E4m3, float (&d)[8], const u32* a, u64 b, int accumulates) {
  WGMMA_REGISTERS("wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3", 8, 9, 10, 11, 12, 13, "");
}

// wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3
// `a` is in registers.
__device__ inline void wgmma_mma(E4m3, float (&d)[16], const u32* a, u64 b, int accumulates) {
  WGMMA_REGISTERS("wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3", 16, 17, 18, 19, 20, 21,
                  "");
}

// wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3
// `a` is in registers.
__device__ inline void wgmma_mma(E4m3, float (&d)[32], const u32* a, u64 b, int accumulates) {
  WGMMA_REGISTERS("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3", 32, 33, 34, 35, 36, 37,
                  "");
}

#undef D8
#undef D16
#undef D32
#undef D128
#undef REGISTERS_8
#undef REGISTERS_16
#undef REGISTERS_32
#undef REGISTERS_128
#undef WGMMA_SHARED
#undef WGMMA_REGISTERS
