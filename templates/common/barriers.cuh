// mbarriers in shared memory, and the pipeline state (index, phase) that steps through stages.

#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

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
