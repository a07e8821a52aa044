// Barriers in shared memory, with phases that are counted by their parity.

#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

using Barrier = u64;

// For `arrivals` in each phase.
__device__ inline void make_barrier(const Barrier& barrier, int arrivals) {
  mbarrier_init(shared_address(&barrier), arrivals);
}

__device__ inline void wait_for(const Barrier& barrier, u32 parity) {
  mbarrier_wait(shared_address(&barrier), parity);
}

__device__ inline void arrive_at(const Barrier& barrier) {
  mbarrier_arrive(shared_address(&barrier));
}

// By lane 0, once `read` is there and all that it was computed from. Arrivals overtake what a warp
// still reads of shared memory, and a copy that waits for them comes before the read.
__device__ inline void arrive_after(const Barrier& barrier, u32 read) {
  mbarrier_arrive_after(shared_address(&barrier), read);
}

// Steps through the stages of a ring; the parity changes whenever it begins anew.
template <int kCount>
struct RingPosition {
  int stage = 0;
  u32 parity = 0;

  __device__ void advance() {
    if (++stage == kCount) {
      stage = 0;
      parity ^= 1;
    }
  }
};
