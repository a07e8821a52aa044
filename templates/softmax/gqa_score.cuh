// Score of grouped-query attention: from Q K^T to the base-2 logit of the softmax.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/arithmetic.cuh"
#include "softmax/online_softmax.cuh"

// A template: Params of a kernel without a soft cap lacks it.
template <typename CappedParams>
__device__ inline float soft_cap_of(const CappedParams& params) {
  return params.soft_cap;
}

struct GqaScore {
  float scale;  // softmax scale times log2(e); with a soft cap, twice that and relative to the cap
  float cap;

  __device__ explicit GqaScore(const Params& params)
      : scale(score_scale(params) * params.score_factor * kLog2E), cap(0.0f) {
    if constexpr (kHasSoftCap) {
      cap = soft_cap_of(params);
      scale = 2.0f * scale / cap;
    }
  }

  // `row_scale` is `scale`, times the inverse scale of a row of Q. Rounded, never fused with what
  // follows: equal scores must have equal distances from the row max.
  __device__ float of(float qk, float row_scale) const {
    const float score = __fmul_rn(qk, row_scale);
    if constexpr (!kHasSoftCap) return score;
    // cap * tanh(z / cap) = cap - 2 * cap / (exp(2 * z / cap) + 1); the exponential may be
    // infinite. tanh.approx has a relative error of 2^-11, which near the cap is too much.
    const float base2_cap = cap * kLog2E;
    const float capped =
        __fmaf_rn(rcp_approx(ex2_approx(score) + 1.0f), -2.0f * base2_cap, base2_cap);
    // Far from the cap that difference would cancel. With x = z / cap, tanh(x) is x - x^3 / 3
    // there, to 2^-22, and `score` is 2 * log2(e) * x.
    constexpr float kSquare = -0.25f / (3.0f * kLog2E * kLog2E);
    const float uncapped = __fmul_rn(score * (0.5f * cap), fmaf(score * score, kSquare, 1.0f));
    return fabsf(score) < kFarFromCap ? uncapped : capped;
  }

  static constexpr float kFarFromCap = 0.0625f * kLog2E;  // of scores: x = 2^-5
};
