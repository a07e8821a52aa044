// Shared-memory plan of a CTA.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "work_tile.cuh"

struct alignas(16) SharedMemoryPlan {
  Work work;  // once per CTA instead of in the registers of every thread
  unsigned char query[kBlockM * kRowBytes];  // [kBlockM][kHeadDim]
  union {
    unsigned char warps[kWarps][kWarpBytes];  // see stage_of and tokens_of
    float combine_buffer[kCombineFloats];  // [kBlockM][kSliceDims + 4], after the main loop
  };
  float row_max[kWarps][kBlockM];  // base 2
  float row_sum[kWarps][kBlockM];
  float probabilities[kWarps][kBlockM][kWarpTokens];  // of tiles with tokens masked for some rows
};
static_assert(sizeof(SharedMemoryPlan) == kSharedBytes, "the spec computes the size of the struct");

// Stage that load `stage_idx` of this warp fills: [kWarpTokens] rows of kStageRowBytes.
__device__ inline unsigned char* stage_of(SharedMemoryPlan& smem, int stage_idx) {
  return smem.warps[warp_index()] + stage_idx % kStages * kStageBytes;
}

// The tile as the MMA reads it: [kWarpTokens] rows of kRowBytes.
__device__ inline unsigned char* tokens_of(SharedMemoryPlan& smem, int stage_idx) {
  return kDequantsKv ? smem.warps[warp_index()] + kStages * kStageBytes : stage_of(smem, stage_idx);
}
