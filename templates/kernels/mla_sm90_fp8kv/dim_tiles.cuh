// Accumulator layout of O^T: output dims of a thread of the PV warpgroups.

#pragma once

#include "common/registers.cuh"
#include "config.cuh"

// Two PV warpgroups each hold all query rows and one half of the output dims. A warp holds 64
// adjacent dims, because these share a scale, in tiles of 16; an MMA covers one tile of each of
// four warps. A thread holds two adjacent dims of a tile: with g = lane / 4, rows g and g + 8 of
// the MMA are dims 2g and 2g + 1.
constexpr int kDimsOfTile = 16;
constexpr int kDimsPerWarp = kHeadDimVo / kConsumerWarps;
constexpr int kDimTiles = kDimsPerWarp / kDimsOfTile;
static_assert(kScaledDims % kDimsPerWarp == 0, "the dims of a warp have one scale per token");

// First dim of accumulator float4 `i` of this lane in warp `warp`; the second is the next one.
__device__ inline int dim_of(int warp, int i) {
  return warp * kDimsPerWarp + i / (kBlockM / 8) * kDimsOfTile + reload_lane() / 4 * 2;
}
