// What is left of the rows of a piece, by one thread each: they are in shared memory.

#pragma once

#include "accumulators.cuh"
#include "combine/fp16_scale.cuh"
#include "combine/partial_state.cuh"
#include "combine/reduce_group.cuh"
#include "config.cuh"
#include "shared_memory.cuh"
#include "softmax/row_state.cuh"

__device__ inline void scales_of_rows(SharedMemory& shared, const Crew&, const Accumulators&,
                                      const OwnRows& rows, float (&scales)[kOwnRows]) {
  const float* own = &shared.row_scale[rows.slot][own_row(0)];
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group) {
    const float2 pair = *reinterpret_cast<const float2*>(own + group * 8);
    scales[group * 2] = pair.x;
    scales[group * 2 + 1] = pair.y;
  }
}

__device__ inline void store_states(PartialRow* target, const Crew& crew, const OwnRows& rows,
                                    const float (&)[kOwnRows]) {
  const int row = crew.thread();
  if (row >= kRows) return;
  const RowState state = rows.state(row);
  target[row] = {
      state.reference, state.sum, {inverse_of_power(rows.shared.row_scale[rows.slot][row])}};
}
static_assert(kScales == 1 && kRows <= kConsumerThreads / 2, "a crew has a thread for each row");
