// Combine of batch-invariant kernels: each CTA visits its work items again when every CTA has
// stored its splits, and reduces its part of their tiles.

#pragma once

#include "combine/reduce_group.cuh"
#include "combine/subtiles.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/sync.cuh"
#include "scheduler/grid_barrier.cuh"
#include "scheduler/phases.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "seq_info.cuh"
#include "shared_memory.cuh"

// Called by the PV warps after the work items of the CTA, or of a phase, when no warp uses Q and
// KV. The sum of a row takes its splits in an order that the length of its sequence determines.
__device__ __noinline__ inline void combine_fixed_splits(const Params& params) {
  SharedMemoryPlan& smem = shared_memory<SharedMemoryPlan>();
  const ReduceGroup all = {-1};
  TileScheduler scheduler(params, smem.scheduler_storage.range, cta_rank_in_group(params),
                          smem.scheduler_storage.initial_state);
  bool waits = has_phases(smem.scheduler_storage);  // or has a split to combine
  bool has_waited = false;
  WorkCoord coord = scheduler.initial_work();
#pragma unroll 1
  while (true) {
    WorkItem work;
    if (coord.seq_idx >= 0) scheduler.fill_splits(work);
    const bool is_combined = coord.seq_idx >= 0 && work.num_splits > 1;
    if ((is_combined || waits) && !has_waited) {
      all.sync();  // all warps have stored their splits
      if (all.is_leader()) wait_for_grid(params, GridBarrier::SplitsStored);
      all.sync();
      has_waited = true;
    }
    if (coord.seq_idx < 0) break;
    if (is_combined) {
      static_cast<WorkCoord&>(work) = coord;
      combine_subtiles(params, work, smem, combine_smem_of_subtile(smem, work));
      all.sync();  // the next tile takes the same shared memory
    }
    coord = scheduler.next_work(false);
  }
  if (!has_waited && all.is_leader()) pass_grid_barrier(params);
}

// Combines a phase, of which the CTA has no further work item.
__device__ inline void combine_phase(const Params& params, SharedMemoryPlan& smem) {
  combine_fixed_splits(params);
  // The next phase writes other partials to the same slots, and loads Q and KV.
  const ReduceGroup all = {-1};
  fence_proxy_async();
  all.sync();
  if (all.is_leader()) wait_for_grid(params, GridBarrier::PhaseCombined);
  all.sync();
  named_barrier_arrive(NamedBarrier::PhaseCombined, kPvThreads + kWarpLanes);
}

// Combines after the last work item; a launch with phases has done so.
__device__ inline void combine_last(const Params& params, SharedMemoryPlan& smem) {
  if constexpr (kBatchInvariant) {
    if (!has_phases(smem.scheduler_storage)) combine_fixed_splits(params);
  }
}
