// Scheduler warps: produce work items, publish them to the producer and consumer warps, and load Q
// of each work item into shared memory.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/load_q.cuh"
#include "pipeline/work_pipeline.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

constexpr int kSchedulerWarps = kProducerThreads / kWarpLanes - kProducerWarps;
constexpr int kSchedulerThreads = kSchedulerWarps * kWarpLanes;

// Called by one thread.
__device__ inline void init_work_barriers(const SharedMemoryPlan& smem) {
  init_work_barriers(smem, kSchedulerWarps, kWorkReaders, kSchedulerWarps);
}

// `scheduler` is at the first work item, for which the consumer warps load Q themselves.
__device__ inline void scheduler_loop(const Params& params, const TileScheduler& scheduler,
                                      SharedMemoryPlan& smem) {
  const bool produces = warp_index() == kPvWarps + kProducerWarps;  // the first of them
  const int rank_in_group = scheduler.rank_in_group;
  if (produces) save_scheduler_state(scheduler, smem);
  const int thread = static_cast<int>(threadIdx.x) % 128 - kProducerWarps * kWarpLanes;
#pragma unroll 1
  for (u32 work_idx = 0;; ++work_idx) {
    const WorkItem& work = smem.work_items[work_slot(work_idx)];
    wait(smem.work_empty[work_slot(work_idx)], work_phase(work_idx) ^ 1);
    if (produces) produce_work<true>(params, rank_in_group, work_idx, smem);
    named_barrier_sync(NamedBarrier::WorkProduced, kSchedulerThreads);
    if (lane_index() == 0) arrive(smem.work_full[work_slot(work_idx)]);
    if (work.seq_idx < 0) return;
    if (work_idx == 0) continue;
    wait(smem.query_empty, query_phase(work_idx) ^ 1);
    load_q_async(params, work, smem, thread, kSchedulerThreads);
    finish_q_load(smem.query_full);
  }
}
