// What of the output a thread of the consumers has.

#pragma once

#include "common/reload_tid.cuh"
#include "config.cuh"

// Two consumers of four warps each. Both have all rows and one half of the output dims, of which a
// warp has 64 neighbours, for these share a scale, in tiles of 16; a product is of a tile of each
// of four warps. A thread has two neighbours of a tile: in rows g and g + 8 of the product, with
// g = lane / 4, are dims 2g and 2g + 1.
constexpr int kDimsOfTile = 16;
constexpr int kDimsOfWarp = kHeadDimVo / kConsumerWarps;
constexpr int kDimTiles = kDimsOfWarp / kDimsOfTile;
static_assert(kScaledDims % kDimsOfWarp == 0, "a warp's dims have one scale a token");

// The first dim of float4 `i` of a thread of warp `warp`; the other is the next.
__device__ inline int dim_of(int warp, int i) {
  return warp * kDimsOfWarp + i / (kBlockM / 8) * kDimsOfTile + reload_lane() / 4 * 2;
}
