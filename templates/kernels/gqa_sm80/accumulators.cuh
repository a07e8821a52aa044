// O accumulators of one warp, in mma fragment layout.

#pragma once

#include "common/types.cuh"
#include "config.cuh"

// Element [m][n][e] belongs to row score_row(m, e / 2) and output dim output_dim(n, e % 2).
using Output = float[kRowGroups][kSliceDims / 8][4];

__device__ inline int output_dim(int group, int parity) {
  return group * 8 + lane_index() % 4 * 2 + parity;
}

__device__ inline void clear_output(Output& output) {
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int n = 0; n < kSliceDims / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) output[m][n][e] = 0.0f;
    }
  }
}

// Rescales this lane's fragment of one row.
__device__ inline void rescale_output(int group, int half, float factor, Output& output) {
#pragma unroll
  for (int n = 0; n < kSliceDims / 8; ++n) {
    output[group][n][half * 2] *= factor;
    output[group][n][half * 2 + 1] *= factor;
  }
}
