// Whether some row of the item sees a value that has been cleared.

#pragma once

#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

__device__ inline int& nonfinite_flag(SharedMemoryPlan& smem, const WorkItem&) {
  return smem.has_nonfinite;
}
