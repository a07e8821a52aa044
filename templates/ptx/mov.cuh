// PTX ISA, "Data Movement and Conversion Instructions: mov". Needs sm_80.

#pragma once

#include "common/types.cuh"

// mov.b64
// Packs two words into one of 64 bits, here: opaque to the compiler.
__device__ inline u64 mov_b64(u32 low, u32 high) {
  u64 word;
  asm("mov.b64 %0, {%1, %2};" : "=l"(word) : "r"(low), "r"(high));
  return word;
}

// mov.b32
// Makes a value opaque to the compiler.
__device__ inline void mov_b32(u32& word) { asm volatile("mov.b32 %0, %0;" : "+r"(word)); }

// mov.b64
// The same.
__device__ inline void mov_b64(u64& word) { asm volatile("mov.b64 %0, %0;" : "+l"(word)); }

// mov.u32
// Re-reads this thread's index in the CTA.
__device__ inline u32 mov_tid_x() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
