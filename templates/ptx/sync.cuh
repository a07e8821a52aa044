// PTX ISA, "Parallel Synchronization and Communication Instructions: barrier, elect, mbarrier,
// fence, griddepcontrol". Needs sm_80.
// Ids of barriers of a CTA are 0 to 15; `threads` counts those that wait and those that only
// arrive. An mbarrier is 8 bytes of shared memory, by address. griddepcontrol does nothing in a
// launch without the programmatic-stream-serialization attribute.

#pragma once

#include "common/types.cuh"

// barrier.cta.sync.aligned
__device__ inline void barrier_sync(int barrier, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// barrier.cta.arrive.aligned
__device__ inline void barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// barrier.cta.red.or.aligned.pred
// Waits for all threads; returns whether any of them passes a nonzero value.
__device__ inline u32 barrier_red_or(int barrier, int threads, u32 value) {
  u32 any;
  asm volatile(
      "{.reg .pred p, q; setp.ne.u32 p, %3, 0; barrier.cta.red.or.aligned.pred q, %1, %2, p; "
      "selp.u32 %0, 1, 0, q;}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(value)
      : "memory");
  return any;
}

// elect.sync
// Waits for all lanes of the warp; true in one of them. So no lane still waits for a phase that a
// guarded copy lets end. Compilers know that no other lane executes what this guards: operands in
// uniform registers, as those of a bulk copy, need no loop over the lanes. Needs sm_90.
__device__ inline bool elect_sync() {
  u32 is_elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}"
               : "=r"(is_elected)::"memory");
  return is_elected != 0;
}

// mbarrier.init.shared::cta.b64
// A phase completes after `count` arrivals and all expected bytes. Needs sm_90.
__device__ inline void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// mbarrier.arrive.shared::cta.b64
// Needs sm_90.
__device__ inline void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.shared::cta.b64
// Called by lane 0. Adds `read` times the lane index, zero there, to the address: a false
// dependency that orders the arrive after the loads. Needs sm_90.
__device__ inline void mbarrier_arrive_after(u32 barrier, u32 read) {
  asm volatile(
      "{.reg .b32 address; mov.b32 address, %%laneid; and.b32 address, address, %1; "
      "add.u32 address, address, %0; mbarrier.arrive.shared::cta.b64 _, [address];}" ::"r"(barrier),
      "r"(read)
      : "memory");
}

// mbarrier.arrive.expect_tx.shared::cta.b64
// Arrives, and raises the byte count that the phase expects. Needs sm_90.
__device__ inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.try_wait.parity.shared::cta.b64
// Waits until the phase of this parity completes. The spin loop is in PTX: across a C++ loop the
// compiler moves accumulators of wgmma in flight to other registers. Needs sm_90.
__device__ inline void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra "
      "again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// fence.acq_rel.cta
// Orders this thread's reads and writes before a later arrive, for the CTA. Needs sm_90.
__device__ inline void fence_acq_rel_cta() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// fence.proxy.async.shared::cta
// Orders this thread's writes of shared memory before accesses of the async proxy: wgmma and TMA.
// Needs sm_90.
__device__ inline void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.mbarrier_init.release.cluster
// Makes mbarrier inits of this thread visible to the async proxy. Needs sm_90.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// griddepcontrol.wait
// Waits until the preceding kernel has completed and its writes are visible. Needs sm_90.
__device__ inline void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// griddepcontrol.launch_dependents
// Lets the next kernel start once every CTA has executed this or exited. Needs sm_90.
__device__ inline void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
