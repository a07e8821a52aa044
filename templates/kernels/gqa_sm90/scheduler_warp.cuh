// Scheduler warp: computes the work items of the CTA and publishes them ahead of the other warps.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "schedule_range.cuh"
#include "shared_memory.cuh"
#include "tile_scheduler.cuh"

// Whether the first work item may be computed before the preceding kernel completes (PDL): then its
// inputs are few enough to be loaded once more and compared.
__device__ inline bool schedules_before_pdl_wait(const Params& params) {
  return params.cu_seqlens_q == nullptr && seqs_per_lane(params) <= kSeqsPerLane;
}

// Starts before the preceding kernel completes. After pdl_wait it loads seq_lens again, while the
// other warps load the first page ids and the first Q. If the preceding kernel has changed them,
// all warps start over.
__device__ inline void scheduler_loop(const Params& params, SharedMemoryPlan& smem) {
  if (!schedules_before_pdl_wait(params)) pdl_wait();
  LaneSeqLens seq_lens = lane_seq_lens(params);
  ScheduleRange range;
  SchedulerState state;
  bool has_more;
  while (true) {
    has_more = find_range(params, seq_lens, range, state);
    smem.work_pipeline.write(0, has_more ? work_at(params, range, state) : WorkItem::none());
    named_barrier_sync(NamedBarrier::FirstWorkReady, kThreads);
    pdl_wait();
    const LaneSeqLens current = lane_seq_lens(params);
    const bool is_valid = !__any_sync(~0u, current.differs_from(seq_lens));
    if (lane_index() == 0) smem.is_first_work_valid = is_valid;
    __syncwarp();
    if (is_valid) break;
    named_barrier_sync(NamedBarrier::FirstWorkChecked,
                       kThreads);  // no warp reads the first item any more
    seq_lens = current;
  }
  named_barrier_arrive(NamedBarrier::FirstWorkChecked, kThreads);
  smem.work_pipeline.publish(0);
#pragma unroll 1
  for (u32 work_idx = 1; has_more; ++work_idx) {
    has_more = next_work(params, range, state);
    const WorkItem next = has_more ? work_at(params, range, state) : WorkItem::none();
    smem.work_pipeline.wait_empty(work_idx);
    smem.work_pipeline.write(work_idx, next);
    smem.work_pipeline.publish(work_idx);
  }
}
