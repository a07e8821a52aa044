// Adds a piece that has been brought to the accumulators, and its rows' states to theirs.

#pragma once

#include "accumulators.cuh"
#include "combine/partial_out.cuh"
#include "combine/partial_state.cuh"
#include "combine/reduce_group.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/ex2.cuh"

__device__ inline void add_piece(const Crew&, const MergeRoom& room, Accumulators& accumulators,
                                 OwnRows& rows) {
  float own_weights[kOwnRows];
  float weights[kOwnRows];
  const int scale = scale_of_warp(fresh_warp());
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    const PartialRow& other = room.state(0, own_row(r));
    const float largest = fmaxf(rows[r].reference, other.reference);
    own_weights[r] = ex2_approx(rows[r].reference - largest);
    const float weight = ex2_approx(other.reference - largest);
    rows[r] = {largest, rows[r].sum * own_weights[r] + other.sum * weight};
    weights[r] = weight * other.scales[scale];
  }
  const uint2* values = room.values(0) + own_values() - room.first_task * kWarpLanes;
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    const float4 own = weighted(accumulator(accumulators, i), own_weights, i);
    const float4 other = weighted(from_halves(values[task_offset(i) * kWarpLanes]), weights, i);
    set_accumulator(
        accumulators, i,
        make_float4(own.x + other.x, own.y + other.y, own.z + other.z, own.w + other.w));
    if (i % 4 == 3) __syncwarp();  // there are no registers for more at a time
  }
}
