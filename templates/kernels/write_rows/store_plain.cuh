// Stores a token that is not quantized: its latent part, and its rope part in a cache of its own.

#pragma once

#include "common/params.cuh"
#include "config.cuh"
#include "elements.cuh"
#include "token.cuh"

__device__ inline void store_token(const Params& params, int index, const Token& token, int page,
                                   int slot, int lane) {
  constexpr int kLaneBytes = kLaneElements * 2;
  if (lane < kScaledLanes) {
    unsigned char* row = params.cache + page * params.page_stride + slot * params.token_stride;
    copy_scaled(params, index, token, row + lane * kLaneBytes);
  }
  if (rest_lane_index() < kRestLanes) {
    unsigned char* row =
        params.rest_cache + page * params.rest_page_stride + slot * params.rest_token_stride;
    copy_rest(params, index, token, row + rest_lane_index() * kLaneBytes);
  }
}
