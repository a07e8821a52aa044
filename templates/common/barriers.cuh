// Barriers of a CTA: mbarriers in shared memory, the pipeline state (index, phase) that steps
// through their stages, and named barriers.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "ptx/sync.cuh"

using Barrier = u64;

// A phase completes after `arrivals` arrivals.
__device__ inline void init_barrier(const Barrier& barrier, int arrivals) {
  mbarrier_init(shared_address(&barrier), arrivals);
}

__device__ inline void wait(const Barrier& barrier, u32 phase) {
  mbarrier_wait(shared_address(&barrier), phase);
}

__device__ inline void arrive(const Barrier& barrier) { mbarrier_arrive(shared_address(&barrier)); }

// Called by lane 0. Depends on `read` and everything it is computed from: a plain arrive may
// overtake shared-memory loads still in flight, and the copy that waits for it would overwrite
// what they read.
__device__ inline void arrive_after_reads(const Barrier& barrier, u32 read) {
  mbarrier_arrive_after(shared_address(&barrier), read);
}

// The phase bit flips whenever the index wraps around.
template <int kCount>
struct PipelineState {
  int index = 0;
  u32 phase = 0;

  __device__ void advance() {
    if (++index == kCount) {
      index = 0;
      phase ^= 1;
    }
  }
};

// Stage and phase of step `i`, counted over all work items of the CTA, of a pipeline of kCount
// stages.
template <int kCount>
__device__ inline int stage_of(u32 i) {
  return static_cast<int>(i % kCount);
}
template <int kCount>
__device__ inline u32 phase_of(u32 i) {
  return i / kCount % 2;
}

// `config.cuh` enumerates named barriers by the fact they announce; barrier 0 is __syncthreads.
// `threads` counts those that wait and those that only arrive.
__device__ inline void named_barrier_sync(NamedBarrier barrier, int threads) {
  barrier_sync(static_cast<int>(barrier), threads);
}

__device__ inline void named_barrier_arrive(NamedBarrier barrier, int threads) {
  barrier_arrive(static_cast<int>(barrier), threads);
}

// Returns whether any thread passes true.
__device__ inline bool named_barrier_sync_or(NamedBarrier barrier, int threads, bool value) {
  return barrier_red_or(static_cast<int>(barrier), threads, value) != 0;
}

// The barrier `index` places behind one that has several: one for each stage.
__device__ constexpr NamedBarrier operator+(NamedBarrier barrier, int index) {
  return static_cast<NamedBarrier>(static_cast<int>(barrier) + index);
}
