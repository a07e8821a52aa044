// The shared memory of a block, whole.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "work_tile.cuh"

struct SharedMemoryPlan {
  unsigned char query[kBlockM * kTokenBytes];  // [kBlockM][kHeadDimQk], swizzled; then the output
  unsigned char kv[kStages * kStageBytes + kDecodedBytes];  // see stage_of and tokens_of
  unsigned char probabilities[kBlockM * kProbabilityBytes];  // [kBlockM][kBlockN], swizzled
  Work work;  // here, and not in the registers of every thread
  int is_masked[kBlockN];  // from some row, for another reason than its position
  int row_kv_end[kBlockM];  // how many tokens a row sees
  float row_partial[kTokenWarps][kBlockM];  // what each token warp found for a row: maximum, or sum
  float row_max[kBlockM];  // what the probabilities are relative to, log2 units
  float row_alpha[kBlockM];  // what the output so far must be multiplied by
};
static_assert(sizeof(SharedMemoryPlan) == kSharedBytes, "the spec computes what the struct takes");

// Leaves the work for all threads to read, divides once per row for all tiles to come, and lets
// every row begin without a reference.
__device__ inline void store_work(const Work& work, SharedMemoryPlan& smem) {
  if (threadIdx.x == 0) smem.work = work;
  for (int row = static_cast<int>(threadIdx.x); row < kBlockM; row += kThreads) {
    smem.row_kv_end[row] = work.kv_end_of_row(row);
    smem.row_max[row] = -kInfinity;
  }
}

// Where item `stage_idx` arrives, [kBlockN] rows of kStageRowBytes.
__device__ inline unsigned char* stage_of(SharedMemoryPlan& smem, int stage_idx) {
  return smem.kv + stage_idx % kStages * kStageBytes;
}

// Where it is multiplied from once it is ready, swizzled [kBlockN][kHeadDimQk].
__device__ inline unsigned char* tokens_of(SharedMemoryPlan& smem, int stage_idx) {
  return kDecodesTokens ? smem.kv + kStages * kStageBytes : stage_of(smem, stage_idx);
}
