// How large the values of a row are. Needs SharedMemory,
// roles/mla_hopper_narrow/accumulators.cuh, roles/mla_hopper/crew.cuh,
// roles/mla_hopper/row_state.cuh.

// The largest finite magnitude of every row, in all warps of the crew. Every lane asks all warps
// for some rows, and tells the others.
__device__ inline void largest_of_rows(SharedMemory& shared, const Crew& crew,
                                       const Accumulators& accumulators,
                                       float (&largest)[kOwnRows]) {
  tell_largest(shared, accumulators);
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
