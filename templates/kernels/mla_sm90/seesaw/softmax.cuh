// Online softmax of one consumer warpgroup, with a lazily updated row max.

#pragma once

#include "accumulators.cuh"
#include "common/registers.cuh"
#include "config.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cvt.cuh"
#include "softmax/online_softmax.cuh"
#include "softmax/scores.cuh"
#include "softmax/work_rows.cuh"

struct Softmax {
  float row_sum[kRowsPerThread];  // over this thread's tokens
  float row_max[kRowsPerThread];  // stale maximum, log2 domain

  // Fast path: P from unscaled scores, with the stale row max and without a mask. Returns whether
  // the result holds for this warp; if not, row sums are unchanged and update_row_max must follow.
  __device__ bool update(const Scores& scores, float scale, Probabilities& probabilities,
                         bool needs_mask) {
    float partial_sum[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      partial_sum[r] = exponentiate([&](int i) { return fmaf(scores[i], scale, -row_max[r]); }, r,
                                    probabilities);
    }
    const bool is_large = fmaxf(fabsf(row_max[0]), fabsf(row_max[1])) > kLargeRowMax;
    if (__any_sync(~0u, fmaxf(partial_sum[0], partial_sum[1]) > kMaxUnnormalizedP || is_large ||
                            needs_mask))
      return false;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) row_sum[r] += partial_sum[r];
    return true;
  }

  // Slow path: raises the row max to the maximum of the scores, here in the log2 domain, and
  // rescales the row sums. Scores and row max are rounded alike, so equal scores have equal
  // probabilities.
  __device__ void update_row_max(const Scores& scores, Probabilities& probabilities,
                                 float (&alpha)[kRowsPerThread]) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const float maximum = quad_reduce_max(max_score(scores, r));
      alpha[r] = raise_row_max(row_max[r], row_sum[r], maximum);
      row_sum[r] += exponentiate([&](int i) { return scores[i] - row_max[r]; }, r, probabilities);
    }
  }

  // Publishes row max and alpha to the other warpgroup.
  __device__ void publish(const float (&alpha)[kRowsPerThread], float* row_max_smem,
                          float* alpha_smem) const {
    const int thread = reload_tid();
    const int row = row_of_thread(thread);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      if (thread % 4 != 0) continue;
      row_max_smem[row + 8 * r] = row_max[r];
      alpha_smem[row + 8 * r] = alpha[r];
    }
  }

  // Adopts the row max that the other warpgroup published; returns whether any row of this warp
  // needs a rescale.
  __device__ bool adopt_row_max(const float* row_max_smem, const float* alpha_smem,
                                float (&alpha)[kRowsPerThread]) {
    bool needs_rescale = false;
    const int row = row_of_thread(reload_tid());
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      alpha[r] = alpha_smem[row + 8 * r];
      needs_rescale |= alpha[r] != 1.0f;
    }
    needs_rescale = __any_sync(~0u, needs_rescale);
    if (needs_rescale) {
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) {
        row_sum[r] *= alpha[r];
        row_max[r] = row_max_smem[row + 8 * r];
      }
    }
    return needs_rescale;
  }

  // P of row `r` from the differences of its scores to the row max; returns the sum.
  template <typename Distance>
  __device__ static float exponentiate(Distance distance, int r, Probabilities& probabilities) {
    float partial_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlockN / 8; ++i) {
      const float low = ex2_approx(distance(i * 4 + r * 2));
      const float high = ex2_approx(distance(i * 4 + r * 2 + 1));
      partial_sum += low + high;
      probabilities[i * 2 + r] = cvt_rn_x2_f32(Element{}, high, low);
    }
    return partial_sum;
  }
};
