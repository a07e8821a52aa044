// Flag per work item: a row attends to a non-finite V element that the main loop cleared. One flag
// per slot, because one warpgroup may reach the next item before the other resets this one's.

#pragma once

#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

__device__ inline int& nonfinite_flag(SharedMemoryPlan& smem, const WorkItem& work) {
  return smem.has_nonfinite[work_slot(work.work_idx)];
}
