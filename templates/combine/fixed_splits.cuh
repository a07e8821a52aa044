// Combine of batch-invariant kernels: each CTA visits its work items again when every CTA has
// stored its splits, and reduces its part of their tiles.

#pragma once

#include "combine/partial.cuh"
#include "combine/subtiles.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/sync.cuh"
#include "scheduler/grid_barrier.cuh"
#include "scheduler/phases.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "seq_info.cuh"
#include "shared_memory.cuh"

// Called by the PV warps after the work items of the CTA, or of a phase, when no warp uses Q and
// KV. The sum of a row takes its splits in an order that the length of its sequence determines.
__device__ inline void combine_fixed_splits(const Params& params) {
  SharedMemoryPlan& smem = shared_memory<SharedMemoryPlan>();
  TileScheduler scheduler(params, smem.scheduler_storage.range, cta_rank_in_group(params),
                          smem.scheduler_storage.initial_state);
  const bool ends_phase = has_phases(smem.scheduler_storage);
  bool has_waited = false;
  bool is_first = true;
#pragma unroll 1
  while (true) {
    WorkItem work;
    static_cast<WorkCoord&>(work) = scheduler.next_work(is_first);
    is_first = false;
    const bool exists = work.seq_idx >= 0;
    CombineSmem combine_smem;
    if (exists) {
      scheduler.fill_splits(work);
      combine_smem = combine_smem_of_subtile(smem, work);
      if (combine_smem.num_frags <= 0) continue;
    } else if (has_waited || !ends_phase) {
      break;
    }
    if (!has_waited) {
      named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);  // all splits are stored
      if (reload_tid() == 0) wait_for_grid(params, GridBarrier::SplitsStored);
      named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
      has_waited = true;
    }
    if (!exists) break;
    reduce_subtile(params, work, smem, combine_smem);
    named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);  // the next one aliases it
  }
  if (!has_waited && reload_tid() == 0) pass_grid_barrier(params);
  if (!ends_phase) return;
  // The next phase writes other partials to the same slots, and loads Q and KV.
  fence_proxy_async();
  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
  if (reload_tid() == 0) wait_for_grid(params, GridBarrier::PhaseCombined);
  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
  named_barrier_arrive(NamedBarrier::PhaseCombined, kPvThreads + kWarpLanes);
}

// The same as a call, which leaves the PV loop more registers.
__device__ __noinline__ inline void call_combine_fixed_splits(const Params& params) {
  combine_fixed_splits(params);
}

// Work loop of the PV warps, which combine splits after the last work item, and after each phase;
// with kCallsCombine, the epilogue combines phases.
template <bool kReloadsIndex = false, typename Process>
__device__ inline void pv_work_loop(const Params& params, SharedMemoryPlan& smem, Process process) {
  if constexpr (!kBatchInvariant || kCallsCombine) {
    work_loop<kReloadsIndex>(smem, process);
    if (kBatchInvariant && !has_phases(smem.scheduler_storage)) call_combine_fixed_splits(params);
    return;
  }
  u32 work_idx = 0;
#pragma unroll 1
  while (true) {
    work_idx = work_loop<kReloadsIndex, true>(smem, process, work_idx);
    const bool is_last = __any_sync(~0u, work_idx == 0);
    if (is_last && has_phases(smem.scheduler_storage)) return;
    combine_fixed_splits(params);
    if (is_last) return;
  }
}
