// Online softmax over the KV blocks of one warp.

#pragma once

#include "common/mma_fragments.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "mma.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cvt.cuh"
#include "softmax/gqa_score.cuh"
#include "softmax/online_softmax.cuh"
#include "softmax/value_scaling.cuh"
#include "token_scales.cuh"
#include "work_item.cuh"

// Four lanes share a row. Row sums cover this lane's tokens only, of P as rounded for the PV GEMM.
struct Softmax {
  GqaScore score;
  float row_max[kRowGroups][2];  // base 2
  float row_sum[kRowGroups][2];
  ValueScaling value_scaling;

  __device__ explicit Softmax(const Params& params) : score(params) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max[m][half] = -kInfinity;
        row_sum[m][half] = 0.0f;
      }
    }
  }

  // Turns S into base-2 scores, minus infinity where masked: a select, not arithmetic, because the
  // masked score may be NaN. `attended` has the tokens of a sparse call.
  __device__ void scale_and_mask(const Params& params, const WorkItem& work, int first_token,
                                 bool has_boundary, u32 attended, Scores& scores) const {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float base2 = score.of(scores[m][n][e], score.scale);
          bool attends = !has_boundary || work.attends(params, fragment_row(m, e / 2),
                                                       first_token + fragment_col(n, e % 2));
          if constexpr (kIsSparse) attends = (attended >> fragment_col(n, e % 2) & 1) != 0;
          scores[m][n][e] = attends ? base2 : -kInfinity;
        }
      }
    }
  }

  // Whether a score of this warp exceeds its row max by more than the rescale threshold, as the
  // first score of a row always does.
  __device__ bool exceeds_threshold(const Scores& scores) const {
    bool exceeds = false;
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          exceeds |= scores[m][n][e] - row_max[m][e / 2] > kRescaleThreshold;
        }
      }
    }
    return __any_sync(~0u, exceeds);
  }

  // Updates the row max of every row that exceeds the threshold, and rescales its sum and O.
  __device__ void update_row_max(const Scores& scores, Output& output) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float block_max = fmaxf(fmaxf(scores[m][0][half * 2], scores[m][0][half * 2 + 1]),
                                fmaxf(scores[m][1][half * 2], scores[m][1][half * 2 + 1]));
        block_max = quad_reduce_max(block_max);
        if (!(block_max - row_max[m][half] > kRescaleThreshold)) continue;
        const float alpha = ex2_approx(row_max[m][half] - block_max);
        row_max[m][half] = block_max;
        row_sum[m][half] *= alpha;
        rescale_row(output[m], half, alpha);
      }
    }
  }

  // P relative to the current row max, and the row sums.
  __device__ void compute_probabilities(const Scores& scores, Probabilities& probabilities) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float low = probability(scores[m][n][half * 2], row_max[m][half]);
          const float high = probability(scores[m][n][half * 2 + 1], row_max[m][half]);
          probabilities[m][n * 2 + half] = round_pair(low, high, row_sum[m][half]);
        }
      }
    }
  }

  // The same for values with token scales, of which this lane has one: P is multiplied by them
  // before it is rounded. A select where masked, because the scale may be NaN.
  __device__ void compute_scaled_probabilities(const Scores& scores, float scale,
                                               Probabilities& probabilities, Output& output) {
    scale = scale_value(value_scaling, scale, output);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float scales[2] = {scale_of_column(scale, n, 0), scale_of_column(scale, n, 1)};
#pragma unroll
      for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float scaled[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float score = scores[m][n][half * 2 + i];
            const float p = probability(score, row_max[m][half]);
            row_sum[m][half] += p;
            scaled[i] = score == -kInfinity ? 0.0f : p * scales[i];
          }
          probabilities[m][n * 2 + half] = cvt_rn_x2_f32(Element{}, scaled[1], scaled[0]);
        }
      }
    }
  }

  __device__ static float probability(float score, float row_max) {
    return score == -kInfinity ? 0.0f : ex2_approx(score - row_max);
  }

  // Publishes row max and row sum of this warp in shared memory.
  __device__ void publish(SharedMemoryPlan& smem) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_sum[m][half] = quad_reduce_sum(row_sum[m][half]);
        if (lane_index() % 4 != 0) continue;
        smem.row_max[warp_index()][fragment_row(m, half)] = row_max[m][half];
        smem.row_sum[warp_index()][fragment_row(m, half)] = row_sum[m][half];
      }
    }
  }
};
