// Softmax state of the rows of a thread, in shared memory.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "shared_memory.cuh"
#include "softmax/row_state.cuh"

static_assert(kIsSame<decltype(SharedMemoryPlan::row_max), float[2][kBlockM]> &&
                  kIsSame<decltype(SharedMemoryPlan::row_sum), float[2][kBlockM]>,
              "state of each row of a work item, a slot for each slot of the work pipeline");

// A thread of a PV warpgroup holds a quarter of all rows and has no registers for their state.
struct ThreadRows {
  SharedMemoryPlan& smem;
  int stage;  // of the work pipeline

  __device__ RowState state(int row) const {
    return {smem.row_max[stage][row], smem.row_sum[stage][row]};
  }
};
