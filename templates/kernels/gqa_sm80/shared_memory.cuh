// The shared memory of a block, whole.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "work_tile.cuh"

struct alignas(16) SharedMemory {
  Work work;  // here, and not in the registers of every thread
  unsigned char query[kRows * kRowBytes];  // [kRows][kHeadDim]
  union {
    unsigned char warps[kWarps][kWarpBytes];  // see item_of and tokens_of
    float merged[kMergedFloats];  // [kRows][kSliceDims + 4], after the last tokens
  };
  float reference[kWarps][kRows];  // what a warp's part of a row is relative to, log2 units
  float sum[kWarps][kRows];
  float probabilities[kWarps][kRows][kWarpTokens];  // of tokens that some rows do not see
};
static_assert(sizeof(SharedMemory) == kSharedBytes, "the spec computes what the struct takes");

// Where item `item` of this warp arrives, [kWarpTokens] rows of kItemRowBytes.
__device__ inline unsigned char* item_of(SharedMemory& shared, int item) {
  return shared.warps[warp_index()] + item % kItems * kItemBytes;
}

// Where it is multiplied from once it is ready, [kWarpTokens] rows of kRowBytes.
__device__ inline unsigned char* tokens_of(SharedMemory& shared, int item) {
  return kDecodesTokens ? shared.warps[warp_index()] + kItems * kItemBytes : item_of(shared, item);
}
