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

// The lane's bf16 elements, which are loaded only now: of bf16 tokens with the same bits.
__device__ inline void store_rest(const Params& params, int index, const Token&,
                                  unsigned char* target, float scale) {
  const int offset = rest_lane_index() * kLaneElements * 2;
  const unsigned char* source = params.rest + index * params.rest_stride + offset;
  if constexpr (kIsSame<Element, Bf16> && !KvRow::kScalesBf16) {
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      reinterpret_cast<Chunk*>(target)[chunk] = reinterpret_cast<const Chunk*>(source)[chunk];
    }
  } else {
    float values[kLaneElements];
    load_elements(source, values);
    store_bf16(target, values, scale);
  }
}
