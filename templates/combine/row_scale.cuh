// Scale of a row of O with swap-AB, for final rows and for splits.

#pragma once

#include "combine/partial.cuh"
#include "common/params.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "softmax/row_state.cuh"
#include "softmax/work_rows.cuh"

// Normalization factor of a row. Stores its LSE.
__device__ inline float final_row_scale(const Params& params, const WorkItem& work, int row,
                                        const RowState& state) {
  const RowResult result = result_of(params, state, sink_of(params, work, row));
  if (params.lse != nullptr && row < work.rows) {
    params.lse[global_row(params, work, row)] = result.lse;
  }
  return result.factor * output_scale(params);
}

// Scale of a row of O as the epilogue stores it. Called by one thread for each row, before the
// barrier that precedes the epilogue, because all warps hold all rows. Of an unsplit work tile it
// is the normalization factor; of a split it is the fp16 scale, where no element of O exceeds
// `amax`.
__device__ inline float row_scale_of(const Params& params, const WorkItem& work, int row,
                                     const RowState& state, float amax) {
  if (work.num_splits != 1) return fp16_scale(amax);
  return final_row_scale(params, work, row, state);
}
