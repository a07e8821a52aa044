// Softmax scale: the factor of the scores Q K^T, natural base.

#pragma once

#include "common/params.cuh"
#include "common/scales.cuh"

__device__ inline float score_scale(const Params& params) {
  const float scale = value_of(params.bmm1_scale_tensor, params.bmm1_scale);
  return params.scores_take_bmm2 ? scale * value_of(params.bmm2_scale_tensor, params.bmm2_scale)
                                 : scale;
}
