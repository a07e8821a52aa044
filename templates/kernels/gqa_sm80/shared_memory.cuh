// The shared memory of a block, whole.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "work_tile.cuh"

struct alignas(16) SharedMemoryPlan {
  Work work;  // here, and not in the registers of every thread
  unsigned char query[kBlockM * kRowBytes];  // [kBlockM][kHeadDim]
  union {
    unsigned char warps[kWarps][kWarpBytes];  // see stage_of and tokens_of
    float combine_buffer[kCombineFloats];  // [kBlockM][kSliceDims + 4], after the last tokens
  };
  float row_max[kWarps][kBlockM];  // what a warp's part of a row is relative to, log2 units
  float row_sum[kWarps][kBlockM];
  float probabilities[kWarps][kBlockM][kWarpTokens];  // of tokens that some rows do not see
};
static_assert(sizeof(SharedMemoryPlan) == kSharedBytes, "the spec computes what the struct takes");

// Where item `stage_idx` of this warp arrives, [kWarpTokens] rows of kStageRowBytes.
__device__ inline unsigned char* stage_of(SharedMemoryPlan& smem, int stage_idx) {
  return smem.warps[warp_index()] + stage_idx % kStages * kStageBytes;
}

// Where it is multiplied from once it is ready, [kWarpTokens] rows of kRowBytes.
__device__ inline unsigned char* tokens_of(SharedMemoryPlan& smem, int stage_idx) {
  return kDecodesTokens ? smem.warps[warp_index()] + kStages * kStageBytes
                        : stage_of(smem, stage_idx);
}
