// Adds a piece that has been brought to the accumulators, and its rows' states to theirs: two rows
// at a time, for there are no registers for the weights of all. Needs merge.cuh, ptx/ex2.cuh.

__device__ inline void add_piece(const MergeRoom& room, Accumulators& accumulators,
                                 RowState (&rows)[kOwnRows]) {
  const uint2* values = room.values(0) + own_values() - room.first_task * kWarpLanes;
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group) {
    float own_weights[2];
    float weights[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      RowState& row = rows[group * 2 + r];
      const PartialRow& other = room.state(0, own_row(group * 2 + r));
      const float largest = fmaxf(row.reference, other.reference);
      own_weights[r] = ex2_approx(row.reference - largest);
      const float weight = ex2_approx(other.reference - largest);
      row = {largest, row.sum * own_weights[r] + other.sum * weight};
      weights[r] = weight * other.scales[0];
    }
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float4 other = from_halves(values[(tile * kRowGroups + group) * kWarpLanes]);
      float* own = accumulators[tile] + group * 4;
      own[0] = own[0] * own_weights[0] + other.x * weights[0];
      own[1] = own[1] * own_weights[1] + other.y * weights[1];
      own[2] = own[2] * own_weights[0] + other.z * weights[0];
      own[3] = own[3] * own_weights[1] + other.w * weights[1];
    }
    __syncwarp();
  }
}
