// Pairwise combine of a loaded split into the accumulators, with softmax states in shared memory.

#pragma once

#include "accumulators.cuh"
#include "combine/partial.cuh"
#include "combine/partial_out.cuh"
#include "combine/reduce_group.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "output_dims.cuh"
#include "ptx/ex2.cuh"
#include "softmax/row_result.cuh"

// Weights of this CTA's split and of the loaded one; they overwrite the loaded state.
struct RowWeights {
  float own_weight;
  float weight;
};

__device__ inline RowWeights row_weights_of(const PartialState& state) {
  return {state.row_max, state.row_sum};
}

// One thread per row, because all warps hold all rows. When two CTAs exchange halves, the other
// reduce group of this CTA has already read the states: the awaited count includes its arrival.
__device__ inline void combine_row_pair(const ReduceGroup& reduce_group,
                                        const CombineSmem& combine_smem, ThreadRows& rows) {
  const int row = reduce_group.thread_idx();
  if (row < kBlockM) {
    PartialState& state = combine_smem.state(0, row);
    const PartialState other = state;
    const RowState own = rows.state(row);
    const float row_max = fmaxf(own.row_max, other.row_max);
    const float own_weight = ex2_approx(own.row_max - row_max);
    const float weight = ex2_approx(other.row_max - row_max);
    rows.set_state(row, {row_max, own.row_sum * own_weight + other.row_sum * weight});
    state.row_max = own_weight;
    state.row_sum = weight * other.scales[0];
  }
  reduce_group.sync();
}

__device__ inline void accumulate_partial(const ReduceGroup& reduce_group,
                                          const CombineSmem& combine_smem,
                                          Accumulators& accumulators, ThreadRows& rows) {
  combine_row_pair(reduce_group, combine_smem, rows);
  const uint2* values =
      combine_smem.values(0) + lane_frag_offset() - combine_smem.first_frag * kWarpLanes;
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group) {
    const int row = row_of(group * 2);
    const RowWeights a = row_weights_of(combine_smem.state(0, row));
    const RowWeights b = row_weights_of(combine_smem.state(0, row + 1));
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float4 other =
          unpack_half4(values[frag_offset(tile * kRowGroups + group) * kWarpLanes]);
      float* own = accumulators[tile] + group * 4;
      own[0] = own[0] * a.own_weight + other.x * a.weight;
      own[1] = own[1] * b.own_weight + other.y * b.weight;
      own[2] = own[2] * a.own_weight + other.z * a.weight;
      own[3] = own[3] * b.own_weight + other.w * b.weight;
    }
    __syncwarp();
  }
}
