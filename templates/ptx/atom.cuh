// PTX ISA, "Parallel Synchronization and Communication Instructions: atom". Needs sm_80.

#pragma once

#include "common/types.cuh"

// atom.acq_rel.gpu.global.add.u32
// Adds, and returns what there was before.
__device__ inline u32 atom_add_acq_rel_gpu(u32* address, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

// atom.acq_rel.gpu.global.inc.u32
// Adds one, or makes `most` zero, and returns what there was before.
__device__ inline u32 atom_inc_acq_rel_gpu(u32* address, u32 most) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(most)
               : "memory");
  return before;
}
