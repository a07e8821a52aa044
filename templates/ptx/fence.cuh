// PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence". Needs sm_90.

#pragma once

// fence.acq_rel.cta
// What this thread has read is in its registers, and what it has written is there for the block,
// before it tells others.
__device__ inline void fence_acq_rel_cta() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// fence.proxy.async.shared::cta
// Orders this thread's own writes of shared memory before what tensor cores and bulk copies do.
__device__ inline void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.mbarrier_init.release.cluster
// Makes barriers that this thread has made known to bulk copies.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
