// What a lane has of rows, tokens and dims, and where tokens lie in a tile.

#pragma once

#include "common/types.cuh"
#include "config.cuh"

// Tokens, or output dims, are the rows of a product, and rows of the query its columns: eight of
// those are enough to fill it.
using QueryRow = uint2[kDimTiles];  // a lane's part of a row
using Scores = float[kSteps][kRowGroups][4];
using Probabilities = u32[kSteps][kRowGroups][2];
using Output = float[kDimTiles][kRowGroups][4];

// The row of column `r` of a lane's accumulators, and of its part of the query.
__device__ inline int row_of(int group, int r) { return group * 8 + lane_index() % 4 * 2 + r; }
__device__ inline int query_row(int group) { return group * 8 + lane_index() / 4; }

// The token of accumulators `half * 2` and `half * 2 + 1`, among the warp's.
__device__ inline int token_of_lane(int step, int half) {
  return step * kStepTokens + half * 8 + lane_index() / 4;
}

// A warp's kv head among the block's, and its place among the warps that have the same.
__device__ inline int head_of_warp(int warp) { return warp % kHeads; }
__device__ inline int rank_of_warp(int warp) { return warp / kHeads; }

// The first of a warp's tokens of a tile.
__device__ inline int first_of_warp(int warp) { return rank_of_warp(warp) * kWarpTokens; }

// Where a token of a tile begins, in the first column of a box's first head.
__device__ inline u32 token_offset(int token) {
  return static_cast<u32>(token / kBoxTokens * kBoxBytes + token % kBoxTokens * kSwizzleBytes);
}

// How the chunks of a token are permuted among themselves: by exclusive or.
__device__ inline u32 swizzle_of(int token) {
  return static_cast<u32>(kSwizzleBytes == 128 ? token & 7 : token >> 1 & 3) * kChunkBytes;
}

// Where a lane finds its row of the four matrices of an ldmatrix: tokens 0 to 7 and 8 to 15 of a
// step, in either of two neighbouring chunks.
struct MatrixRows {
  u32 offset;

  // Of lanes 0 to 7, 8 to 15 and so on: which half of the tokens, and which chunk.
  __device__ MatrixRows(int warp, int half, int chunk) {
    const int token = first_of_warp(warp) + half * 8 + lane_index() % 8;
    offset = head_of_warp(warp) * kHeadBytes + token_offset(token) +
             (swizzle_of(token) ^ chunk * kChunkBytes);
  }

  // Of pair `pair` of chunks, counted through all columns.
  __device__ u32 at(const unsigned char* tile, int step, int pair) const {
    constexpr int kSwizzlePairs = kSwizzleBytes / (2 * kChunkBytes);
    return shared_address(tile) + (offset ^ pair % kSwizzlePairs * 2 * kChunkBytes) +
           pair / kSwizzlePairs * kColumnBytes + token_offset(step * kStepTokens);
  }
};

// Both halves of the tokens and then the next chunk; both chunks and then the next tokens: as the
// first operand of mma has its parts in either product.
__device__ inline MatrixRows key_rows(int warp) {
  return MatrixRows(warp, lane_index() / 8 % 2, lane_index() / 16);
}
__device__ inline MatrixRows value_rows(int warp) {
  return MatrixRows(warp, lane_index() / 16, lane_index() / 8 % 2);
}

constexpr int kChunkPairs = kRowBytes / (2 * kChunkBytes);
