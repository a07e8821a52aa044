// Accumulator layout of O^T: output dims of a thread of the PV warpgroups.

#pragma once

#include "common/registers.cuh"
#include "config.cuh"

// Two PV warpgroups each hold all query rows and one half of the output dims, in tiles of 64. A
// warp holds 16 dims of a tile, and a thread two adjacent ones: rows g and g + 8 of the MMA, with
// g = lane / 4, are dims 2g and 2g + 1.
constexpr int kDimsOfTile = 64;
constexpr int kHalfDims = kHeadDimVo / 2;
constexpr int kDimTiles = kHalfDims / kDimsOfTile;

// First dim of accumulator float4 `i` of this lane in warp `warp`; the second is the next one.
__device__ inline int dim_of(int warp, int i) {
  return warp / 4 * kHalfDims + i / (kBlockM / 8) * kDimsOfTile + warp % 4 * 16 +
         reload_lane() / 4 * 2;
}
