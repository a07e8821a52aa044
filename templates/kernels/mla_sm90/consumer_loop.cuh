// Consumer loop: processes the work items of the CTA in order.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "pipeline/work_pipeline.cuh"
#include "process_work.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

__device__ inline void consumer_loop(const Params& params, SharedMemoryPlan& smem) {
  ConsumerState state(params, smem);
  finish_q_load(smem.first_query_full);
  u32 work_idx = 0;
  while (true) {
    wait(smem.work_full[work_slot(work_idx)], work_phase(work_idx));
    const WorkItem& work = smem.work_items[work_slot(work_idx)];
    if (work.seq_idx < 0) return;
    wait_query(smem, work_idx);
    process_work(params, work, smem, state);
    work_idx = work.work_idx + 1;  // reloaded: takes no register during the mainloop
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.work_empty[work_slot(work_idx - 1)]);
  }
}
