// PTX ISA, "Data Movement and Conversion Instructions: cp.async, cp.async.bulk". Needs sm_80.
// Of the bulk copies, `map` is the generic address of a tensor map; x, y, z, w, v count elements,
// the innermost first. `policy` is one of createpolicy for L2.

#pragma once

#include "common/types.cuh"

// cp.async.cg.shared.global.L2::128B
// Copies 16 bytes, bypassing L1; bytes from `source_bytes` on are zero-filled.
__device__ inline void cp_async_cg_16(u32 shared_address, const void* global, u32 source_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address),
               "l"(global), "r"(source_bytes)
               : "memory");
}

// cp.async.cg.shared.global.L2::cache_hint
// The same, with one of createpolicy for L2.
__device__ inline void cp_async_cg_16(u32 shared_address, const void* global, u32 source_bytes,
                                      u64 policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address),
      "l"(global), "r"(source_bytes), "l"(policy)
      : "memory");
}

// cp.async.ca.shared.global
// Copies 4 bytes; if `source_bytes` is 0 they are not read and become zero.
__device__ inline void cp_async_ca_4(u32 shared_address, const void* global, u32 source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address), "l"(global),
               "r"(source_bytes)
               : "memory");
}

// cp.async.ca.shared.global
// Copies 8 bytes; if `source_bytes` is 0 they are not read and become zero.
__device__ inline void cp_async_ca_8(u32 shared_address, const void* global, u32 source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address), "l"(global),
               "r"(source_bytes)
               : "memory");
}

// cp.async.commit_group
__device__ inline void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group
// Waits until at most `kPending` of this thread's newest groups are in flight.
template <int kPending>
__device__ inline void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// cp.async.mbarrier.arrive.noinc.shared::cta.b64
// Arrives at a barrier when all copies issued by this thread have completed.
__device__ inline void cp_async_mbarrier_arrive_noinc(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
// Copies a box to shared memory, zero-fills what lies outside the tensor, and completes its bytes
// at the barrier. Needs sm_90.
__device__ inline void cp_async_bulk_tensor(u32 target, const void* map, u32 barrier, u64 policy,
                                            int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(target),
      "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
// Needs sm_90.
__device__ inline void cp_async_bulk_tensor(u32 target, const void* map, u32 barrier, u64 policy,
                                            int x, int y, int z, int w, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(target),
      "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}
