// The schedulers, three warps: hand items to all roles, and bring each item's query into shared
// memory.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "load_q.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/barrier.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

constexpr int kSchedulerWarps = 3;
constexpr int kSchedulerThreads = kSchedulerWarps * kWarpLanes;

// By one thread.
__device__ inline void init_work_barriers(const SharedMemoryPlan& smem) {
  init_work_barriers(smem, kSchedulerWarps, kWorkReaders, kSchedulerWarps);
}

// `scheduler` is at the first item, whose query consumers bring.
__device__ inline void scheduler_loop(const Params& params, const TileScheduler& scheduler,
                                      SharedMemoryPlan& smem) {
  const bool runs_scheduler = warp_index() == kConsumerWarps + 1;  // one of the warps
  const int rank_in_group = scheduler.rank_in_group;
  if (runs_scheduler) save_scheduler_state(scheduler, smem);
  const int thread = static_cast<int>(threadIdx.x) % 128 - kWarpLanes;
#pragma unroll 1
  for (u32 work_idx = 0;; ++work_idx) {
    const WorkItem& work = smem.work_items[work_slot(work_idx)];
    wait(smem.work_empty[work_slot(work_idx)], work_phase(work_idx) ^ 1);
    if (runs_scheduler) produce_work(params, rank_in_group, work_idx, smem);
    barrier_sync(kSchedulerBarrier, kSchedulerThreads);
    if (lane_index() == 0) arrive(smem.work_full[work_slot(work_idx)]);
    if (work.seq_idx < 0) return;
    if (work_idx == 0) continue;
    wait(smem.query_empty, query_phase(work_idx) ^ 1);
    load_q_async(params, work, smem, thread, kSchedulerThreads);
    finish_q_load(smem.query_full);
  }
}
