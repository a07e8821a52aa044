// Barriers of the CTAs of a launch, all of which are co-resident.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "ptx/atomic.cuh"
#include "ptx/load.cuh"

// A barrier has two semaphores: how many CTAs have arrived, in the lower half word, and how many of
// these wait; and how many still have to see that all have arrived. They are zero before and after.
// Of two barriers in a row a CTA may arrive at the second while others have not seen the first, so
// these have semaphores of their own.
enum class GridBarrier : int { SplitsStored = 0, PhaseCombined = 2 };
constexpr u32 kWaitingCta = 1u << 16;

// Called by one thread, after what the CTA has stored.
__device__ inline void arrive_at_grid(const Params& params, GridBarrier barrier, u32 waiting) {
  u32* arrivals = params.semaphores + static_cast<int>(barrier);
  const u32 count = atom_add_acq_rel_gpu(arrivals, waiting + 1) + waiting + 1;
  if (count % kWaitingCta != gridDim.x) return;
  *arrivals = 0;
  atom_add_acq_rel_gpu(arrivals + 1, count / kWaitingCta);
}

// For a CTA that needs nothing of the others.
__device__ inline void pass_grid_barrier(const Params& params) {
  arrive_at_grid(params, GridBarrier::SplitsStored, 0);
}

// Waits until all CTAs have arrived or left.
__device__ inline void wait_for_grid(const Params& params, GridBarrier barrier) {
  arrive_at_grid(params, barrier, kWaitingCta);
  u32* num_waiting = params.semaphores + static_cast<int>(barrier) + 1;
  while (ld_acquire_gpu(num_waiting) == 0) {
  }
  red_add_relaxed_gpu(num_waiting, ~0u);
}
