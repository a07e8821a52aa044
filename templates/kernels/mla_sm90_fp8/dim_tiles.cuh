// What of the output a thread of the consumers has.

#pragma once

#include "common/reload_tid.cuh"
#include "config.cuh"

// Two consumers of four warps each. Both have all rows and one half of the output dims, in tiles of
// 64; of a tile a warp has 16, and a thread two neighbours: in rows g and g + 8 of the product,
// with g = lane / 4, are dims 2g and 2g + 1.
constexpr int kDimsOfTile = 64;
constexpr int kHalfDims = kHeadDimVo / 2;
constexpr int kDimTiles = kHalfDims / kDimsOfTile;

// The first dim of float4 `i` of a thread of warp `warp`; the other is the next.
__device__ inline int dim_of(int warp, int i) {
  return warp / 4 * kHalfDims + i / (kBlockM / 8) * kDimsOfTile + warp % 4 * 16 +
         reload_lane() / 4 * 2;
}
