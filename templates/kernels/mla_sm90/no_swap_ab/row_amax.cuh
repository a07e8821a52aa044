// How large the values of a row are.

#pragma once

#include "accumulators.cuh"
#include "combine/reduce_group.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "shared_memory.cuh"
#include "softmax/row_reduce.cuh"
#include "softmax/row_state.cuh"

// In several parts, for an instruction waits for the one before it.
template <typename Filter>
__device__ inline float largest_of_row(const Accumulators& accumulators, int r, Filter filter) {
  constexpr int kParts = 4;
  float parts[kParts] = {};
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    const float* of = accumulators + i * 4 + r * 2;
    float& part = parts[i % kParts];
    part = fmaxf(part, fmaxf(fabsf(filter(of[0])), fabsf(filter(of[1]))));
  }
  return row_maximum(fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3])));
}

// The largest finite magnitude of this half of every row.
__device__ inline void largest_of_rows(SharedMemory&, const Crew&, const Accumulators& accumulators,
                                       float (&largest)[kOwnRows]) {
  float all = 0.0f;
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    largest[r] = largest_of_row(accumulators, r, [](float value) { return value; });
    all = fmaxf(all, largest[r]);
  }
  if (!__any_sync(~0u, all == kInfinity)) return;
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    largest[r] = largest_of_row(accumulators, r, nan_unless_finite);
  }
}

// Whether this thread writes what there is of its rows, and what there is of this half of them.
__device__ inline bool is_row_writer(int) { return fresh_thread() < 128 && fresh_lane() % 4 == 0; }
__device__ inline bool is_scale_writer(int) { return fresh_lane() % 4 == 0; }
