// How large the values of a row are. Needs SharedMemory,
// roles/mla_hopper_narrow/accumulators.cuh, roles/mla_hopper/crew.cuh,
// roles/mla_hopper/row_state.cuh.

// What a warp tells others of its rows.
__device__ inline float* told_of_rows(SharedMemory& shared, int warp) {
  return reinterpret_cast<float*>(shared.staging[warp]);
}

// The largest finite magnitude of every row, in all warps of the crew. Every lane asks all warps
// for some rows, and tells the others.
__device__ inline void largest_of_rows(SharedMemory& shared, const Crew& crew,
                                       const Accumulators& accumulators,
                                       float (&largest)[kOwnRows]) {
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    float own = 0.0f;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float* of = accumulators[tile] + r / 2 * 4 + r % 2;
      own = fmaxf(own, fabsf(nan_unless_finite(of[0])));
      own = fmaxf(own, fabsf(nan_unless_finite(of[2])));
    }
    own = maximum_of_lanes(own);
    if (fresh_lane() < 4) told_of_rows(shared, fresh_warp())[own_row(r)] = own;
  }
  crew.sync();
  constexpr int kRowsOfLane = ceil_div(kRows, kWarpLanes);
  float found[kRowsOfLane];
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i) {
    const int row = (i * kWarpLanes + fresh_lane()) % kRows;
    found[i] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kConsumerWarps; ++warp) {
      const float told = told_of_rows(shared, warp)[row];
      if (crew.has_warp(warp)) found[i] = fmaxf(found[i], told);
    }
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    largest[r] = __shfl_sync(~0u, found[r / 2 * 8 / kWarpLanes], own_row(r) % kWarpLanes);
  }
}

// Whether the thread of that index in its crew writes what there is of its rows: all warps have the
// same.
__device__ inline bool is_row_writer(int thread) { return thread < 4; }
__device__ inline bool is_scale_writer(int thread) { return thread < 4; }
