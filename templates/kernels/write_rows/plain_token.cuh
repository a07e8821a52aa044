// A token without a prologue: its elements are what a row has.

#pragma once

#include "common/packed_row.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "elements.cuh"

struct Token {
  float scaled[kLaneElements] = {};  // of the codes
};

__device__ inline void load_token(const Params& params, int index, Token& token) {
  const int offset = lane_index() * kLaneElements * 2;
  if (lane_index() >= kScaledLanes) return;
  load_elements(params.scaled + index * params.scaled_stride + offset, token.scaled);
}

__device__ inline void copy_elements(const unsigned char* source, unsigned char* target) {
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
    reinterpret_cast<Chunk*>(target)[chunk] = reinterpret_cast<const Chunk*>(source)[chunk];
  }
}

// The lane's elements in the dtype of the tokens, which are loaded only now.
__device__ inline void copy_scaled(const Params& params, int index, const Token&,
                                   unsigned char* target) {
  const int offset = lane_index() * kLaneElements * 2;
  copy_elements(params.scaled + index * params.scaled_stride + offset, target);
}

__device__ inline void copy_rest(const Params& params, int index, const Token&,
                                 unsigned char* target) {
  const int offset = rest_lane_index() * kLaneElements * 2;
  copy_elements(params.rest + index * params.rest_stride + offset, target);
}

// The lane's bf16 elements: of bf16 tokens with the same bits.
__device__ inline void store_rest(const Params& params, int index, const Token& token,
                                  unsigned char* target, float scale) {
  if constexpr (kIsSame<Element, Bf16> && !KvRow::kScalesBf16) {
    copy_rest(params, index, token, target);
  } else {
    const int offset = rest_lane_index() * kLaneElements * 2;
    float values[kLaneElements];
    load_elements(params.rest + index * params.rest_stride + offset, values);
    store_bf16(target, values, scale);
  }
}
