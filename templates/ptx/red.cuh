// PTX ISA, "Parallel Synchronization and Communication Instructions: red". Needs sm_80.

#pragma once

#include "common/types.cuh"

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
