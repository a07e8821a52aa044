// Scheduler warp: computes the work items of the CTA and publishes them ahead of the other warps.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "find_range.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"
#include "work_item.cuh"

// Whether the first work item may be computed before the preceding kernel completes (PDL): then its
// inputs are few enough to be loaded once more and compared.
__device__ inline bool schedules_before_pdl_wait(const Params& params) {
  return params.cu_seqlens_q == nullptr && seqs_per_lane(params) <= kSeqsPerLane;
}

// Lets the other warps load the first page ids and the first Q of the work item that is written.
// After pdl_wait it loads seq_lens again and returns whether they are unchanged; otherwise all
// warps start over.
__device__ inline bool publish_first_work(const Params& params, LaneSeqLens& seq_lens,
                                          SharedMemoryPlan& smem) {
  named_barrier_sync(NamedBarrier::FirstWorkReady, kThreads);
  pdl_wait();
  const LaneSeqLens current = lane_seq_lens(params);
  const bool is_valid = !__any_sync(~0u, current.differs_from(seq_lens));
  if (lane_index() == 0) smem.is_first_work_valid = is_valid;
  __syncwarp();
  if (is_valid) {
    named_barrier_arrive(NamedBarrier::FirstWorkChecked, kThreads);
  } else {
    // No warp reads the first item any more.
    named_barrier_sync(NamedBarrier::FirstWorkChecked, kThreads);
    seq_lens = current;
  }
  return is_valid;
}

// Starts before the preceding kernel completes. One loop for the first work item and the others
// keeps the code short.
__device__ inline void scheduler_loop(const Params& params, SharedMemoryPlan& smem) {
  if (!schedules_before_pdl_wait(params)) pdl_wait();
  const int cta = static_cast<int>(blockIdx.x);
  const int cta_group = cta / params.cta_group_size;
  const int rank_in_group = cta - cta_group * params.cta_group_size;
  LaneSeqLens seq_lens = lane_seq_lens(params);
  ScheduleRange range;
  SchedulerState state;
  bool has_work = true;
#pragma unroll 1
  for (u32 work_idx = 0; has_work;) {
    has_work = work_idx == 0 ? find_range(params, cta_group, seq_lens, range, state)
                             : state.advance(params, range);
    const WorkItem work =
        has_work ? work_at(params, range, rank_in_group, state) : WorkItem::none();
    if (work_idx > 0) smem.work_pipeline.wait_empty(work_idx);
    smem.work_pipeline.write(work_idx, work);
    if (work_idx == 0 && !publish_first_work(params, seq_lens, smem)) {
      has_work = true;
      continue;
    }
    smem.work_pipeline.publish(work_idx++);
  }
}
