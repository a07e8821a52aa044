// How large the values of a row may be. Needs SharedMemory, scales.cuh,
// roles/mla_hopper_e4m3/own_rows.cuh, blocks/power_of_two.cuh.

// A bound that nothing need be looked for: a row adds up values, which are in units, by its
// probabilities, whose sum is multiplied by units.
__device__ inline void largest_of_rows(SharedMemory& shared, const Crew&, const Accumulators&,
                                       const OwnRows& rows, float (&largest)[kOwnRows]) {
  const float inverse = inverse_of_power(shared.row_units[rows.slot]);
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) largest[r] = rows[r].sum * inverse * kLargestValue;
}
