// PTX ISA, "Data Movement and Conversion Instructions: ld". Needs sm_80.

// ld.acquire.gpu.global.u32
// What was written before the value by others is seen after.
__device__ inline u32 ld_acquire_gpu(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
