// Scores S = Q K^T of a KV block in registers. A thread holds two rows, g and g + 8 of its warp's
// with g = lane / 4, and two adjacent tokens of every eight; four lanes share a row.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/tile_scheduler.cuh"

constexpr int kScoreRows = 2;
using Scores = float[kBlockN / 2];

// Largest score of row `r` in this lane.
__device__ inline float max_score(const Scores& scores, int r) {
  float maximum = -kInfinity;
#pragma unroll
  for (int i = 0; i < kBlockN / 8; ++i) {
    maximum = fmaxf(maximum, fmaxf(scores[i * 4 + r * 2], scores[i * 4 + r * 2 + 1]));
  }
  return maximum;
}

// To the log2 domain, rounded as the row max is.
__device__ inline void scale_scores(Scores& scores, float scale) {
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i) scores[i] = __fmul_rn(scores[i], scale);
}

// `row_at(r)` is row `r` of this thread. A select, not an addition: a masked score may be NaN.
template <typename RowAt>
__device__ inline void mask_scores(Scores& scores, const WorkItem& work, int first_token,
                                   RowAt row_at) {
#pragma unroll
  for (int r = 0; r < kScoreRows; ++r) {
    const int col_limit = work.row_kv_end[row_at(r)] - first_token - lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kBlockN / 8; ++i) {
      if (i * 8 >= col_limit) scores[i * 4 + r * 2] = -kInfinity;
      if (i * 8 + 1 >= col_limit) scores[i * 4 + r * 2 + 1] = -kInfinity;
    }
  }
}

// Masks the tokens whose bit is set.
__device__ inline void mask_invalid(Scores& scores, u64 invalid) {
  const u64 bits = invalid >> lane_index() % 4 * 2;
#pragma unroll
  for (int r = 0; r < kScoreRows; ++r) {
#pragma unroll
    for (int i = 0; i < kBlockN / 8; ++i) {
      if (bits >> i * 8 & 1) scores[i * 4 + r * 2] = -kInfinity;
      if (bits >> (i * 8 + 1) & 1) scores[i * 4 + r * 2 + 1] = -kInfinity;
    }
  }
}
