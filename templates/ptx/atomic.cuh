// PTX ISA, "Parallel Synchronization and Communication Instructions: atom, red". Needs sm_80.

#pragma once

#include "common/types.cuh"

// atom.acq_rel.gpu.global.add.u32
// Adds, and returns the old value.
__device__ inline u32 atom_add_acq_rel_gpu(u32* address, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

// atom.acq_rel.gpu.global.inc.u32
// Adds one, wraps to zero at `limit`, and returns the old value.
__device__ inline u32 atom_inc_acq_rel_gpu(u32* address, u32 limit) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(limit)
               : "memory");
  return before;
}

// red.release.gpu.global.inc.u32
// Adds one, and wraps to zero at `limit`. Releases preceding writes to threads that acquire the
// count.
__device__ inline void red_inc_release_gpu(u32* address, u32 limit) {
  asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(address), "r"(limit) : "memory");
}

// red.relaxed.gpu.global.inc.u32
// Adds one, and wraps to zero at `limit`.
__device__ inline void red_inc_relaxed_gpu(u32* address, u32 limit) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(address), "r"(limit) : "memory");
}

// red.relaxed.gpu.global.add.u32
__device__ inline void red_add_relaxed_gpu(u32* address, u32 value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
