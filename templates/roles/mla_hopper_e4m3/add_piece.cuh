// Adds a piece that has been brought to the accumulators, and its rows' states to theirs. Needs
// merge.cuh, own_rows.cuh, ptx/ex2.cuh.

// What a piece and the other are multiplied by, and what their row comes to.
struct JoinedRow {
  float own_weight;
  float weight;
  RowState state;

  __device__ JoinedRow(RowState own, const PartialRow& other) {
    const float largest = fmaxf(own.reference, other.reference);
    own_weight = ex2_approx(own.reference - largest);
    weight = ex2_approx(other.reference - largest);
    state = {largest, own.sum * own_weight + other.sum * weight};
  }
};

__device__ inline void add_piece(const Crew& crew, const MergeRoom& room,
                                 Accumulators& accumulators, OwnRows& rows) {
  const uint2* values = room.values(0) + own_values() - room.first_task * kWarpLanes;
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group) {
    float own_weights[2];
    float weights[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const PartialRow& other = room.state(0, own_row(group * 2 + r));
      const JoinedRow joined(rows[group * 2 + r], other);
      own_weights[r] = joined.own_weight;
      weights[r] = joined.weight * other.scales[0];
    }
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float4 other = from_halves(values[task_offset(tile * kRowGroups + group) * kWarpLanes]);
      float* own = accumulators[tile] + group * 4;
      own[0] = own[0] * own_weights[0] + other.x * weights[0];
      own[1] = own[1] * own_weights[1] + other.y * weights[1];
      own[2] = own[2] * own_weights[0] + other.z * weights[0];
      own[3] = own[3] * own_weights[1] + other.w * weights[1];
    }
    __syncwarp();
  }
  crew.sync();  // all have read the states as they were
  const int row = crew.thread();
  if (row < kRows) rows.set_state(row, JoinedRow(rows.state(row), room.state(0, row)).state);
  crew.sync();
}
