// Dequantisation of a K or V tile: from the stored dtype to the element type of the MMA.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "dequant.cuh"

// Dequantises the first `kDims` elements of every row, 16 at a time.
template <int kDims>
__device__ inline void dequant_tokens(const unsigned char* stage_ptr, const TokenScales& scales,
                                      unsigned char* tokens) {
  constexpr int kScaleGroups = kDims / 16;
#pragma unroll 2
  for (int first = 0; first < kWarpTokens * kScaleGroups; first += kWarpLanes) {
    const int group_idx = first + lane_index();
    const int token = group_idx / kScaleGroups;
    const int scale_group = group_idx % kScaleGroups;
    if (token >= kWarpTokens) continue;
    Chunk decoded[2];
    dequant_elements(stage_ptr + token * kStageRowBytes, scales, token, scale_group, decoded);
    Chunk* target =
        reinterpret_cast<Chunk*>(tokens + token * kRowBytes + scale_group * 2 * kChunkBytes);
    target[0] = decoded[0];
    target[1] = decoded[1];
  }
}
