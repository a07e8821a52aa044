// What the rows of an item have come to, in shared memory: a consumer's thread has a quarter of
// all rows, and no registers for them.

#pragma once

#include "common/accumulators_transposed.cuh"
#include "shared_memory.cuh"
#include "softmax/row_state.cuh"

struct OwnRows {
  SharedMemory& shared;
  int slot;  // of the item

  // Of row `r` of this thread.
  __device__ RowState operator[](int r) const { return state(own_row(r)); }

  __device__ RowState state(int row) const {
    return {shared.row_reference[slot][row], shared.row_sum[slot][row]};
  }
  __device__ void set_state(int row, RowState state) {
    shared.row_reference[slot][row] = state.reference;
    shared.row_sum[slot][row] = state.sum;
  }
};
