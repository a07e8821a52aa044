// Online-softmax state of a thread's rows, in shared memory: a thread of a PV warpgroup holds a
// quarter of all rows and has no registers for their state.

#pragma once

#include "common/accumulators_swap_ab.cuh"
#include "shared_memory.cuh"
#include "softmax/row_result.cuh"

struct ThreadRows {
  SharedMemoryPlan& smem;
  int stage;  // of the work pipeline

  // State of row `r` of this thread.
  __device__ RowState operator[](int r) const { return state(row_of(r)); }

  __device__ RowState state(int row) const {
    return {smem.row_max[stage][row], smem.row_sum[stage][row]};
  }
  __device__ void set_state(int row, RowState state) {
    smem.row_max[stage][row] = state.row_max;
    smem.row_sum[stage][row] = state.row_sum;
  }
};
