// What is left of the rows of a piece, where threads have states of rows in registers.

#pragma once

#include "accumulators.cuh"
#include "combine/fp16_scale.cuh"
#include "combine/partial_state.cuh"
#include "combine/reduce_group.cuh"
#include "common/reload_tid.cuh"
#include "row_amax.cuh"
#include "shared_memory.cuh"

__device__ inline void scales_of_rows(SharedMemory& shared, const Crew& crew,
                                      const Accumulators& accumulators, const OwnRows&,
                                      float (&scales)[kOwnRows]) {
  largest_of_rows(shared, crew, accumulators, scales);
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) scales[r] = half_scale(scales[r]);
}

__device__ inline void store_states(PartialRow* target, const Crew& crew, const OwnRows& rows,
                                    const float (&scales)[kOwnRows]) {
  const bool tells_state = is_row_writer(crew.thread());
  const bool tells_scale = is_scale_writer(crew.thread());
  const int scale = scale_of_warp(fresh_warp());
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    PartialRow& row = target[own_row(r)];
    if (tells_state) {
      row.reference = rows[r].reference;
      row.sum = rows[r].sum;
    }
    if (tells_scale) row.scales[scale] = inverse_of_power(scales[r]);
  }
}
