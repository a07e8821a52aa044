// Shared-memory plan of a CTA.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "work_tile.cuh"

struct SharedMemoryPlan {
  unsigned char query[kBlockM * kTokenBytes];  // [kBlockM][kHeadDimQk], swizzled; then the output
  unsigned char kv[kStages * kStageBytes + kDecodedBytes];  // see stage_of and tokens_of
  unsigned char probabilities[kBlockM * kProbabilityBytes];  // [kBlockM][kBlockN], swizzled
  Work work;  // once per CTA instead of in the registers of every thread
  int is_masked[kBlockN];  // for some row, other than by its position
  int row_kv_end[kBlockM];  // KV limit of a row
  float row_partial[kTokenWarps][kBlockM];  // row max or row sum of each token warp
  float row_max[kBlockM];  // P is relative to it; base 2
  float row_alpha[kBlockM];  // rescale factor of O
};
static_assert(sizeof(SharedMemoryPlan) == kSharedBytes, "the spec computes what the struct takes");

// Publishes the work to all threads, computes the KV limit of every row once, and resets the row
// max.
__device__ inline void store_work(const Work& work, SharedMemoryPlan& smem) {
  if (threadIdx.x == 0) smem.work = work;
  for (int row = static_cast<int>(threadIdx.x); row < kBlockM; row += kThreads) {
    smem.row_kv_end[row] = work.kv_end_of_row(row);
    smem.row_max[row] = -kInfinity;
  }
}

// Stage that load `stage_idx` fills: [kBlockN] rows of kStageRowBytes.
__device__ inline unsigned char* stage_of(SharedMemoryPlan& smem, int stage_idx) {
  return smem.kv + stage_idx % kStages * kStageBytes;
}

// The tile as the MMA reads it, swizzled [kBlockN][kHeadDimQk].
__device__ inline unsigned char* tokens_of(SharedMemoryPlan& smem, int stage_idx) {
  return kDequantsKv ? smem.kv + kStages * kStageBytes : stage_of(smem, stage_idx);
}
