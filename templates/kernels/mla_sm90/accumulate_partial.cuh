// Pairwise combine: adds the partial O of the other split, loaded into shared memory, to the
// accumulators, and its softmax state (m, l) to that of the rows.

#pragma once

#include "accumulators.cuh"
#include "combine/partial.cuh"
#include "combine/partial_out.cuh"
#include "combine/reduce_group.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/ex2.cuh"

__device__ inline void accumulate_partial(const ReduceGroup&, const CombineSmem& combine_smem,
                                          Accumulators& accumulators, ThreadRows& rows) {
  float own_weights[kRowsPerThread];
  float weights[kRowsPerThread];
  const int scale = scale_of_warp(reload_warp());
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const PartialState& other = combine_smem.state(0, row_of(r));
    const float row_max = fmaxf(rows[r].row_max, other.row_max);
    own_weights[r] = ex2_approx(rows[r].row_max - row_max);
    const float weight = ex2_approx(other.row_max - row_max);
    rows[r] = {row_max, rows[r].row_sum * own_weights[r] + other.row_sum * weight};
    weights[r] = weight * other.scales[scale];
  }
  const uint2* values =
      combine_smem.values(0) + lane_frag_offset() - combine_smem.first_frag * kWarpLanes;
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    const float4 own = weighted(accumulator(accumulators, i), own_weights, i);
    const float4 other = weighted(unpack_half4(values[frag_offset(i) * kWarpLanes]), weights, i);
    set_accumulator(
        accumulators, i,
        make_float4(own.x + other.x, own.y + other.y, own.z + other.z, own.w + other.w));
    if (i % 4 == 3) __syncwarp();  // limits the loads in flight: registers are scarce
  }
}
