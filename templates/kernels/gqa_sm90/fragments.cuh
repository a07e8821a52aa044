// MMA fragments with swap-AB, and ldmatrix addresses in the swizzled KV tile.

#pragma once

#include "common/types.cuh"
#include "config.cuh"

// Swap-AB: tokens (QK GEMM) or output dims (PV GEMM) are M, and query rows are N, so that eight
// query rows fill an MMA.
using QFragment = uint2[kDimTiles];  // a lane's fragment of a row
using Scores = float[kSteps][kRowGroups][4];
using Probabilities = u32[kSteps][kRowGroups][2];
using Output = float[kPartDimTiles][kRowGroups][4];

// Query row of column `r` of a lane's accumulators; query row of a lane's Q fragment.
__device__ inline int row_of(int group, int r) { return group * 8 + lane_index() % 4 * 2 + r; }
__device__ inline int q_fragment_row(int group) { return group * 8 + lane_index() / 4; }

// Token of accumulators `half * 2` and `half * 2 + 1`, relative to the warp's first token.
// Unaligned rows are those of even tokens, then of odd ones.
__device__ inline int token_of_lane(int step, int half) {
  const int row = lane_index() / 4;
  return step * kStepTokens + (kHasUnalignedRows ? row * 2 + half : half * 8 + row);
}

// Part of the output dims of a warp, and index of the warp among those of the same part.
__device__ inline int part_of_warp(int warp) { return kDimParts == 1 ? 0 : warp / kPartWarps; }
__device__ inline int warp_in_part(int warp) { return warp - part_of_warp(warp) * kPartWarps; }

// kv head of a warp among those of the CTA, and rank of the warp among the warps of that head that
// take other tokens.
__device__ inline int head_of_warp(int warp) { return warp % kKvHeadsPerCta; }
__device__ inline int rank_of_warp(int warp) { return warp_in_part(warp) / kKvHeadsPerCta; }

// First token of a warp in a KV block.
__device__ inline int first_token_of_warp(int warp) { return rank_of_warp(warp) * kWarpTokens; }

// Offset of a token of a KV tile, in the first column of the first head of its TMA box.
template <typename Tile>
__device__ inline u32 token_offset(int token) {
  return static_cast<u32>(token / kBoxTokens * Tile::kBoxBytes +
                          token % kBoxTokens * kSwizzleBytes);
}

// The swizzle of a token: an XOR on the offset of its 16-byte chunks. Eight tokens of one chunk lie
// in different banks.
__device__ inline u32 swizzle_of(int token) {
  constexpr int kLog2Tokens = kSwizzleBytes == 128  ? 0
                              : kSwizzleBytes == 64 ? 1
                                                    : 2;  // of 128 bytes
  return static_cast<u32>(token >> kLog2Tokens & kSwizzleBytes / kChunkBytes - 1) * kChunkBytes;
}

// Row address of a lane for ldmatrix.x4. Its four matrices are tokens 0 to 7 and 8 to 15 of a step,
// in each of two adjacent chunks.
template <typename Tile>
struct LdmatrixRows {
  u32 offset;

  // `half` of the tokens and `chunk` that the group of eight lanes of this lane addresses.
  __device__ LdmatrixRows(int warp, int half, int chunk) {
    const int token = first_token_of_warp(warp) + half * 8 + lane_index() % 8;
    offset = head_of_warp(warp) * Tile::kHeadBytes + token_offset<Tile>(token) +
             (swizzle_of(token) ^ chunk * kChunkBytes);
  }

  // Address in pair `pair` of chunks, counted across all swizzled columns.
  __device__ u32 at(const unsigned char* tile, int step, int pair) const {
    constexpr int kSwizzlePairs = kSwizzleBytes / (2 * kChunkBytes);
    return shared_address(tile) + (offset ^ pair % kSwizzlePairs * 2 * kChunkBytes) +
           pair / kSwizzlePairs * kColumnBytes + token_offset<Tile>(step * kStepTokens);
  }
};

// Matrix order of the A operand: in the QK GEMM both token halves of a chunk, then of the next
// chunk; in the PV GEMM both chunks of a token half, then of the next half.
using KeyRows = LdmatrixRows<KeyTile>;
using ValueRows = LdmatrixRows<ValueTile>;
__device__ inline KeyRows k_ldmatrix_rows(int warp) {
  return KeyRows(warp, lane_index() / 8 % 2, lane_index() / 16);
}
// From the first of the warp's output dims on.
__device__ inline ValueRows v_ldmatrix_rows(int warp) {
  ValueRows rows(warp, lane_index() / 16, lane_index() / 8 % 2);
  rows.offset += part_of_warp(warp) * (ValueTile::kColumns / kDimParts) * kColumnBytes;
  return rows;
}

// Offset of the scales of token `warp_token` of a warp in a stage.
__device__ inline int scale_row_offset(int warp, int warp_token) {
  return kScalesOffset + head_of_warp(warp) * kScaleHeadBytes +
         (first_token_of_warp(warp) + warp_token) * kScaleRowBytes;
}

// Block scales of a lane's tokens of a step, for KV caches without any.
struct NoBlockScales {
  __device__ NoBlockScales(const unsigned char*, int, int) {}
};
