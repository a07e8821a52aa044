// How large the values of a row are. Needs SharedMemory, accumulators.cuh,
// blocks/row_reductions.cuh, roles/mla_hopper/row_state.cuh.

// The largest finite magnitude of every row, in both halves.
__device__ inline void largest_of_rows(SharedMemory& shared, const Accumulators& accumulators,
                                       float (&largest)[kOwnRows]) {
  const int warp = fresh_warp();
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    float own = 0.0f;
#pragma unroll
    for (int i = 0; i < kHalfDims / 2; i += 4) {
      own = fmaxf(own, fabsf(nan_unless_finite(accumulators[i + r * 2])));
      own = fmaxf(own, fabsf(nan_unless_finite(accumulators[i + r * 2 + 1])));
    }
    own = row_maximum(own);
    if (fresh_thread() % 4 == 0) told_of_rows(shared, warp)[own_row(r)] = own;
    largest[r] = own;
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    largest[r] = fmaxf(largest[r], told_of_rows(shared, warp ^ 4)[own_row(r)]);
  }
}
