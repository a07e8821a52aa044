// PTX ISA, "Data Movement and Conversion Instructions: createpolicy, ld, prefetch". Needs sm_80.

#pragma once

#include "common/types.cuh"

// ld.acquire.gpu.global.u32
// Later accesses see what other CTAs wrote before they released the value.
__device__ inline u32 ld_acquire_gpu(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// ld.relaxed.gpu.global.s32
// Relaxed at gpu scope: may race with writers, and is never served from L1.
__device__ inline int ld_relaxed_gpu(const int* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// ld.relaxed.gpu.global.u32
__device__ inline u32 ld_relaxed_gpu(const u32* address) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// ld.global.cg.v2.f32
// Bypasses L1, which may hold stale data of other CTAs.
__device__ inline float2 ld_global_cg_v2_f32(const void* address) {
  float2 value;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "l"(address)
               : "memory");
  return value;
}

// ld.global.cg.v4.f32
__device__ inline float4 ld_global_cg_v4_f32(const void* address) {
  float4 value;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

// prefetch.tensormap
// Prefetches a TMA descriptor by its generic address. Needs sm_90.
__device__ inline void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// prefetch.global.L2
// Prefetches the cache line of an address into L2.
__device__ inline void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// prefetch.global.L2::evict_last
// Prefetches the cache line of an address into L2, which evicts it after others.
__device__ inline void prefetch_l2_evict_last(const void* address) {
  asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(address) : "memory");
}

// createpolicy.fractional.L2::evict_first.b64
// L2 evicts such lines before others.
__device__ inline u64 createpolicy_evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}

// createpolicy.fractional.L2::evict_normal.b64
__device__ inline u64 createpolicy_evict_normal() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(policy));
  return policy;
}
