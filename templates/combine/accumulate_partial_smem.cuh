// Adds a piece that has been brought to the accumulators, and its rows' states to theirs.

#pragma once

#include "accumulators.cuh"
#include "combine/partial_out.cuh"
#include "combine/partial_state.cuh"
#include "combine/reduce_group.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "output_dims.cuh"
#include "ptx/ex2.cuh"
#include "softmax/row_state.cuh"

// What a piece and the other are multiplied by, in place of the other's state.
struct JoinedRow {
  float own_weight;
  float weight;
};

__device__ inline JoinedRow joined_row(const PartialRow& state) {
  return {state.reference, state.sum};
}

// By one thread for each row: all warps have all rows. Where two pieces are exchanged, this block's
// other crew has read the states before: what is awaited counts what it has left, too.
__device__ inline void join_rows(const Crew& crew, const MergeRoom& room, OwnRows& rows) {
  const int row = crew.thread();
  if (row < kRows) {
    PartialRow& state = room.state(0, row);
    const PartialRow other = state;
    const RowState own = rows.state(row);
    const float largest = fmaxf(own.reference, other.reference);
    const float own_weight = ex2_approx(own.reference - largest);
    const float weight = ex2_approx(other.reference - largest);
    rows.set_state(row, {largest, own.sum * own_weight + other.sum * weight});
    state.reference = own_weight;
    state.sum = weight * other.scales[0];
  }
  crew.sync();
}

__device__ inline void add_piece(const Crew& crew, const MergeRoom& room,
                                 Accumulators& accumulators, OwnRows& rows) {
  join_rows(crew, room, rows);
  const uint2* values = room.values(0) + own_values() - room.first_task * kWarpLanes;
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group) {
    const int row = own_row(group * 2);
    const JoinedRow a = joined_row(room.state(0, row));
    const JoinedRow b = joined_row(room.state(0, row + 1));
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float4 other = from_halves(values[task_offset(tile * kRowGroups + group) * kWarpLanes]);
      float* own = accumulators[tile] + group * 4;
      own[0] = own[0] * a.own_weight + other.x * a.weight;
      own[1] = own[1] * b.own_weight + other.y * b.weight;
      own[2] = own[2] * a.own_weight + other.z * a.weight;
      own[3] = own[3] * b.own_weight + other.w * b.weight;
    }
    __syncwarp();
  }
}
