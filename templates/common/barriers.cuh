// Barriers in shared memory, with phases that are counted by their parity.

#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

using Barrier = u64;

// For `arrivals` in each phase.
__device__ inline void init_barrier(const Barrier& barrier, int arrivals) {
  mbarrier_init(shared_address(&barrier), arrivals);
}

__device__ inline void wait(const Barrier& barrier, u32 phase) {
  mbarrier_wait(shared_address(&barrier), phase);
}

__device__ inline void arrive(const Barrier& barrier) { mbarrier_arrive(shared_address(&barrier)); }

// By lane 0, once `read` is there and all that it was computed from. Arrivals overtake what a warp
// still reads of shared memory, and a copy that waits for them comes before the read.
__device__ inline void arrive_after_reads(const Barrier& barrier, u32 read) {
  mbarrier_arrive_after(shared_address(&barrier), read);
}

// Steps through the stages of a ring; the parity changes whenever it begins anew.
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
