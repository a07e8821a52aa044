// Score of grouped-query attention: from Q K^T to the base-2 logit of the softmax.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "softmax/online_softmax.cuh"

struct GqaScore {
  float scale;  // softmax scale times log2(e)

  __device__ explicit GqaScore(const Params& params)
      : scale(score_scale(params) * params.score_factor * kLog2E) {}

  // `row_scale` is `scale`, times the inverse scale of a row of Q. Rounded, never fused: equal
  // scores must have equal distances from the row max.
  __device__ float of(float qk, float row_scale) const { return __fmul_rn(qk, row_scale); }
};
