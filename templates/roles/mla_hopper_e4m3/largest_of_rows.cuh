// How large the values of a row may be. Needs kLargestValue, own_rows.cuh,
// roles/mla_hopper/crew.cuh.

// A bound that nothing need be looked for: a row adds up values by its probabilities.
__device__ inline void largest_of_rows(SharedMemory&, const Crew&, const Accumulators&,
                                       const OwnRows& rows, float (&largest)[kOwnRows]) {
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) largest[r] = rows[r].sum * kLargestValue;
}
