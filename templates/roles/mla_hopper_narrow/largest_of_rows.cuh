// How large the values of a row are. Needs SharedMemory, accumulators.cuh,
// roles/mla_hopper/crew.cuh, roles/mla_hopper/row_state.cuh.

// What a warp tells others of its rows, where it stages output at other times.
__device__ inline float* told_of_rows(SharedMemory& shared, int warp) {
  return reinterpret_cast<float*>(shared.staging[warp]);
}

// The largest finite magnitude of every row, in all warps of the crew.
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
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    largest[r] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kConsumerWarps; ++warp) {
      const float found = told_of_rows(shared, warp)[own_row(r)];
      if (crew.has_warp(warp)) largest[r] = fmaxf(largest[r], found);
    }
  }
}

// Whether the thread of that index in its crew writes what there is of its rows: all warps have the
// same.
__device__ inline bool is_row_writer(int thread) { return thread < 4; }
__device__ inline bool is_scale_writer(int thread) { return thread < 4; }
