// Work loop of the consumer warps.

#pragma once

#include "combine/fixed_splits.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "mainloop.cuh"
#include "pipeline/load_q.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/sync.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

// Consumer warps load the first Q themselves: they have no other work before it arrives.
__device__ inline void consumer_loop(const Params& params, const WorkCoord& first_work,
                                     SharedMemoryPlan& smem) {
  load_q_async(params, first_work, smem, static_cast<int>(threadIdx.x), kPvThreads);
  ConsumerState state(params, smem);
  finish_q_load(smem.first_query_full);
  pv_work_loop(params, smem, [&](const WorkItem& work, u32 work_idx) {
    wait_query(smem, work_idx);
    if constexpr (kIsSparse) fence_proxy_async();  // wgmma reads what cp.async has written
    process_work(params, work, smem, state);
  });
}
