// Online softmax over the tokens of one warp, with a row max of its own.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "convert_q.cuh"
#include "fragments.cuh"
#include "load_q.cuh"
#include "mma.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cvt.cuh"
#include "ptx/warp_matrix.cuh"
#include "softmax/gqa_score.cuh"
#include "softmax/online_softmax.cuh"
#include "softmax/row_state.cuh"
#include "sparse_tokens.cuh"
#include "work_item.cuh"

// Row sums cover this lane's tokens only.
struct Softmax {
  float row_max[kRowGroups][2];  // base 2
  float row_sum[kRowGroups][2];

  __device__ Softmax() {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_max[n][r] = -kFloatMax;
        row_sum[n][r] = 0.0f;
      }
    }
  }

  // Turns base-2 scores into P in place, and updates the row sums.
  __device__ void update(Scores& scores, Output& output) {
    if (__any_sync(~0u, exceeds_threshold(scores))) update_row_max(scores, output);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& score = scores[step][n][e];
          score = ex2_approx(score - row_max[n][e % 2]);
          row_sum[n][e % 2] += score;
        }
      }
    }
  }

  // Whether a score exceeds its row max by more than the rescale threshold, as the first score of a
  // row always does.
  __device__ bool exceeds_threshold(const Scores& scores) const {
    float max_score = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          max_score = fmaxf(max_score, scores[step][n][e] - row_max[n][e % 2]);
        }
      }
    }
    return max_score > kRescaleThreshold;
  }

  // Updates the row max of every row, and rescales its sum and O.
  __device__ void update_row_max(const Scores& scores, Output& output) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float tile_max = -kInfinity;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          tile_max = fmaxf(tile_max, fmaxf(scores[step][n][r], scores[step][n][2 + r]));
        }
#pragma unroll
        for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
          tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, lanes));
        }
        const float next = fmaxf(tile_max, row_max[n][r]);
        const float alpha = ex2_approx(row_max[n][r] - next);
        row_max[n][r] = next;
        row_sum[n][r] *= alpha;
#pragma unroll
        for (int tile = 0; tile < kPartDimTiles; ++tile) {
          output[tile][n][r] *= alpha;
          output[tile][n][2 + r] *= alpha;
        }
      }
    }
  }

  // Publishes row max and row sum of a row group in shared memory.
  __device__ void publish(int group, RowState (&states)[8]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = row_sum[group][r];
#pragma unroll
      for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
        total += __shfl_xor_sync(~0u, total, lanes);
      }
      if (lane_index() < 4) states[row_of(0, r)] = {row_max[group][r], total};
    }
  }
};

// Softmax scale of each row; it includes the inverse Q scale, and the factor of dequantized K.
struct RowScales {
  float scales[kScalesQ ? kRowGroups : 1][2];

  __device__ RowScales(const Query& query, float softmax_scale) {
#pragma unroll
    for (int n = 0; n < (kScalesQ ? kRowGroups : 1); ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scales[n][r] = softmax_scale * kDequantFactor * query.inverse_scale_of(n, r);
      }
    }
  }

  __device__ float of(int group, int r) const { return kScalesQ ? scales[group][r] : scales[0][0]; }
};

__device__ inline void scale_scores(const GqaScore& score, const RowScales& row_scales,
                                    Scores& scores) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[step][n][e] = score.of(scores[step][n][e], row_scales.of(n, e % 2));
      }
    }
  }
}

// Applies the draft mask (tree mask of speculative tokens).
__device__ inline void apply_draft_mask(const Params& params, const WorkItem& work, int first_token,
                                        Scores& scores) {
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = row_of(n, e % 2);
      if (row >= work.rows) continue;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int token = first_token + token_of_lane(step, e / 2);
        if (!work.draft_mask_allows(params, row, token)) scores[step][n][e] = -kInfinity;
      }
    }
  }
}

// Masks the scores of tokens that a row may not attend to: a select, because the masked score may
// be NaN.
__device__ inline void mask_scores(const Params& params, const WorkItem& work, int first_token,
                                   Scores& scores) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowRange rows = work.rows_of(params, first_token + token_of_lane(step, half));
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (!rows.contains(row_of(n, r))) scores[step][n][half * 2 + r] = -kInfinity;
        }
      }
    }
  }
  if (params.draft_mask != nullptr) apply_draft_mask(params, work, first_token, scores);
}

// Masks the scores of the other tokens of a sparse call, for all rows.
__device__ inline void mask_sparse_scores(SparseTokens::Type tokens, Scores& scores) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (SparseTokens::has(tokens, token_of_lane(step, half))) continue;
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
        scores[step][n][half * 2] = scores[step][n][half * 2 + 1] = -kInfinity;
      }
    }
  }
}

// P^T as the B fragments of the PV GEMM: tokens along K, query rows along N.
__device__ inline void transpose_probabilities(const Scores& scores, Probabilities& probabilities) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* acc = scores[step][n] + half * 2;
        probabilities[step][n][half] = movmatrix_trans(cvt_rn_x2_f32(Element{}, acc[1], acc[0]));
      }
    }
  }
}
