// PTX ISA, "Parallel Synchronization and Communication Instructions: red". Needs sm_80.

// red.release.gpu.global.add.u32
// Adds; what was written before is seen by those who acquire the sum.
__device__ inline void red_add_release_gpu(u32* address, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
