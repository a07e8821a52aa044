// From the tokens of an item as they are stored to tokens that can be multiplied.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "dequant.cuh"

// Decodes the first `kDims` elements of every row, 16 at a time.
template <int kDims>
__device__ inline void decode_tokens(const unsigned char* item, const TokenScales& scales,
                                     unsigned char* tokens) {
  constexpr int kParts = kDims / 16;
#pragma unroll 2
  for (int first = 0; first < kWarpTokens * kParts; first += kWarpLanes) {
    const int task = first + lane_index();
    const int token = task / kParts;
    const int part = task % kParts;
    if (token >= kWarpTokens) continue;
    Chunk decoded[2];
    decode_elements(item + token * kItemRowBytes, scales, token, part, decoded);
    Chunk* target = reinterpret_cast<Chunk*>(tokens + token * kRowBytes + part * 2 * kChunkBytes);
    target[0] = decoded[0];
    target[1] = decoded[1];
  }
}
