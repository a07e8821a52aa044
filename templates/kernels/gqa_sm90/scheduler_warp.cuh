// The finder, one warp: finds the work of the block, item by item, ahead of those that do it.

#pragma once

#include "common/params.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/barrier.cuh"
#include "schedule_range.cuh"
#include "shared_memory.cuh"
#include "tile_scheduler.cuh"

// Whether the work may be found before the kernel before has ended: what is read for it then is
// read once more.
__device__ inline bool schedules_before_pdl_wait(const Params& params) {
  return params.cu_seqlens_q == nullptr && seqs_per_lane(params) <= kSeqsPerLane;
}

// Begins before the kernel before has ended. Then lengths are looked at again, while others ask for
// the first page ids and the first query; if that kernel has changed them, all begin anew.
__device__ inline void scheduler_loop(const Params& params, SharedMemoryPlan& smem) {
  if (!schedules_before_pdl_wait(params)) pdl_wait();
  LaneSeqLens seq_lens = lane_seq_lens(params);
  ScheduleRange range;
  SchedulerState state;
  bool has_more;
  while (true) {
    has_more = find_range(params, seq_lens, range, state);
    smem.work_pipeline.write(0, has_more ? work_at(params, range, state) : WorkItem::none());
    barrier_sync(kStartBarrier, kThreads);
    pdl_wait();
    const LaneSeqLens current = lane_seq_lens(params);
    const bool is_valid = !__any_sync(~0u, current.differs_from(seq_lens));
    if (lane_index() == 0) smem.is_first_work_valid = is_valid;
    __syncwarp();
    if (is_valid) break;
    barrier_sync(kCheckedBarrier, kThreads);  // nobody reads the first item any more
    seq_lens = current;
  }
  barrier_arrive(kCheckedBarrier, kThreads);
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
