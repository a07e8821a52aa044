// Online softmax over the tokens of one warp.

#pragma once

#include "accumulators.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ex2.cuh"
#include "qk_gemm.cuh"
#include "shared_memory.cuh"
#include "softmax/rescale_threshold.cuh"
#include "softmax/row_reduce.cuh"
#include "softmax/softmax_scale.cuh"
#include "work_tile.cuh"

// The probabilities of a group of tokens, rounded, as mma takes them: rows and tokens as in Scores.
using Probabilities = u32[kRowGroups][4];

// Four lanes hold a row together. The sums are over this lane's tokens only, of probabilities as
// P V uses them: rounded.
struct Softmax {
  float scale;  // of the scores, times log2(e)
  float row_max[kRowGroups][2];  // log2 units
  float row_sum[kRowGroups][2];

  __device__ explicit Softmax(const Params& params)
      : scale(score_scale(params) * params.score_factor * kLog2E) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max[m][half] = -kInfinity;
        row_sum[m][half] = 0.0f;
      }
    }
  }

  // Scores become log2 units, and minus infinity where a row does not see the token: a select, not
  // arithmetic, for the hidden score may be NaN.
  __device__ void scale_and_mask(const Params& params, const Work& work, int first_token,
                                 bool has_boundary, Scores& scores) const {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float score = __fmul_rn(scores[m][n][e], scale);
          const bool attends = !has_boundary || work.attends(params, score_row(m, e / 2),
                                                             first_token + score_token(n, e % 2));
          scores[m][n][e] = attends ? score : -kInfinity;
        }
      }
    }
  }

  // Whether a score of this warp exceeds its reference by too much, as any score does that is the
  // first of its row.
  __device__ bool exceeds(const Scores& scores) const {
    bool found = false;
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          found |= scores[m][n][e] - row_max[m][e / 2] > kRescaleThreshold;
        }
      }
    }
    return __any_sync(~0u, found);
  }

  // Moves the reference of every row whose maximum exceeds it by too much.
  __device__ void update_row_max(const Scores& scores, Output& output) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float maximum = fmaxf(fmaxf(scores[m][0][half * 2], scores[m][0][half * 2 + 1]),
                              fmaxf(scores[m][1][half * 2], scores[m][1][half * 2 + 1]));
        maximum = quad_reduce_max(maximum);
        if (!(maximum - row_max[m][half] > kRescaleThreshold)) continue;
        const float rescale = ex2_approx(row_max[m][half] - maximum);
        row_max[m][half] = maximum;
        row_sum[m][half] *= rescale;
        rescale_output(m, half, rescale, output);
      }
    }
  }

  // The probabilities relative to the references as they are, and their sums.
  __device__ void compute_probabilities(const Scores& scores, Probabilities& probabilities) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float low = probability(scores[m][n][half * 2], row_max[m][half]);
          const float high = probability(scores[m][n][half * 2 + 1], row_max[m][half]);
          const u32 packed = cvt_rn_x2_f32(Element{}, high, low);
          row_sum[m][half] += cvt_f32(Element{}, static_cast<u16>(packed)) +
                              cvt_f32(Element{}, static_cast<u16>(packed >> 16));
          probabilities[m][n * 2 + half] = packed;
        }
      }
    }
  }

  __device__ static float probability(float score, float row_max) {
    return score == -kInfinity ? 0.0f : ex2_approx(score - row_max);
  }

  // Leaves references and sums of this warp's rows in shared memory.
  __device__ void publish(SharedMemoryPlan& smem) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_sum[m][half] = quad_reduce_sum(row_sum[m][half]);
        if (lane_index() % 4 != 0) continue;
        smem.row_max[warp_index()][score_row(m, half)] = row_max[m][half];
        smem.row_sum[warp_index()][score_row(m, half)] = row_sum[m][half];
      }
    }
  }
};
