// PTX ISA, "Data Movement and Conversion Instructions: prefetch". Needs sm_90.

#pragma once

// prefetch.tensormap
// Prefetches a TMA descriptor by its generic address.
__device__ inline void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// prefetch.global.L2
// Prefetches the cache line of an address into L2.
__device__ inline void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}
