// What of the output a thread of the consumer has, and how many scores.

#pragma once

#include "common/reload_tid.cuh"
#include "config.cuh"
#include "softmax/row_state.cuh"

// One consumer of four warps, with tokens or output dims in the place of rows, and rows in the
// place of columns: few rows fill a product then. Of the scores a warp has 16 tokens, and of each
// tile of output dims 16.
constexpr int kDimTiles = kLatentTiles;
using Scores = float[kBlockM / 2];
using ThreadRows = RowState[kBlockM / 4];

// The first dim of float4 `i` of a thread of warp `warp`; the other is 8 further.
__device__ inline int dim_of(int warp, int i) {
  return i / (kBlockM / 8) * kTileElements + warp * 16 + reload_lane() / 4;
}

// The dim of part `c` of float4 `i`.
__device__ inline int element_dim(int warp, int i, int c) { return dim_of(warp, i) + c / 2 * 8; }

// Where a warp is among those of its half, and the warp that is there.
__device__ inline int rank_in_half(int warp) { return warp % 2; }
__device__ inline int warp_at(int half, int rank) { return half * 2 + rank; }
