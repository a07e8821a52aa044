// Scales of the tokens of a KV block: those of K multiply scores, and those of V multiply P. Each
// lane has the scale of one token.

#pragma once

#include "common/mma_fragments.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "mma.cuh"
#include "softmax/value_scaling.cuh"

// Of the token of this lane, in a stage that has arrived.
__device__ inline float token_scale_of(const unsigned char* stage) {
  return reinterpret_cast<const float*>(stage + kScalesOffset)[lane_index() % kBlockN];
}

// Scale of the token of column `n`, `e % 2` of Scores.
__device__ inline float scale_of_column(float scale, int n, int e) {
  return __shfl_sync(~0u, scale, fragment_col(n, e % 2));
}

__device__ inline void multiply_by_tokens(Scores& scores, float scale) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float own = scale_of_column(scale, n, e);
#pragma unroll
      for (int m = 0; m < kRowGroups; ++m) {
        scores[m][n][e] *= own;
        scores[m][n][e + 2] *= own;
      }
    }
  }
}

__device__ inline void multiply_output(Output& output, float factor) {
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) rescale_row(output[m], half, factor);
  }
}

// Returns the scale of V for P, and scales O if the scaling moves.
__device__ inline float scale_value(ValueScaling& scaling, float scale, Output& output) {
  float magnitude = ValueScaling::magnitude_of(scale);
  if (__any_sync(~0u, scaling.exceeds(magnitude))) {
#pragma unroll
    for (int lanes = 1; lanes < kBlockN; lanes *= 2) {
      magnitude = fmaxf(magnitude, __shfl_xor_sync(~0u, magnitude, lanes));
    }
    multiply_output(output, scaling.move(magnitude));
  }
  return scaling.scaled(scale);
}
