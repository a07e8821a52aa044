// Whether some row of an item sees a value that has been cleared. One consumer may be at the
// next item before the other has set this one's back.

#pragma once

#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

__device__ inline int& nonfinite_flag(SharedMemoryPlan& smem, const WorkItem& work) {
  return smem.has_nonfinite[work_slot(work.work_idx)];
}
