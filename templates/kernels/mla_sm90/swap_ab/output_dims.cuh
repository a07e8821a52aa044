// Accumulator layout of O^T, swap-AB: output dims of a thread.

#pragma once

#include "common/reload_tid.cuh"
#include "config.cuh"
#include "softmax/row_result.cuh"

// One consumer warpgroup. The M dimension of the MMAs is tokens (S^T) or output dims (O^T), and the
// N dimension is query rows: M is 64 at least, so that few rows would leave a normal MMA mostly
// idle. A warp has 16 tokens of S^T, and 16 dims of each tile of O^T.
constexpr int kDimTiles = kLatentTiles;
using Scores = float[kBlockM / 2];
using ThreadRows = RowState[kBlockM / 4];

// First dim of accumulator float4 `i` of this lane in warp `warp`; the second is 8 higher.
__device__ inline int dim_of(int warp, int i) {
  return i / (kBlockM / 8) * kTileElements + warp * 16 + reload_lane() / 4;
}

// Dim of element `c` of accumulator float4 `i`.
__device__ inline int element_dim(int warp, int i, int c) { return dim_of(warp, i) + c / 2 * 8; }

// Rank of a warp in its half of the consumer warps, and the inverse.
__device__ inline int rank_in_half(int warp) { return warp % 2; }
__device__ inline int warp_at(int half, int rank) { return half * 2 + rank; }
