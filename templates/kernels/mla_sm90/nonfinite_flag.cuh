// Non-finite flag: whether any row of the work item attends to a V element that was cleared.

#pragma once

#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

__device__ inline int& nonfinite_flag(SharedMemoryPlan& smem, const WorkItem&) {
  return smem.has_nonfinite;
}
