// The shared memory of a block, whole.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "work_tile.cuh"

struct SharedMemory {
  unsigned char query[kRows * kTokenBytes];  // [kRows][kHeadDimQk], swizzled; then the output
  unsigned char kv[kStages * kStageBytes + kDecodedBytes];  // see stage_of and tokens_of
  unsigned char probabilities[kRows * kProbabilityBytes];  // [kRows][kTileTokens], swizzled
  Work work;  // here, and not in the registers of every thread
  int is_hidden[kTileTokens];  // from some row, for another reason than its position
  int row_visible[kRows];  // how many tokens a row sees
  float row_partial[kTokenWarps][kRows];  // what each token warp found for a row: maximum, or sum
  float row_reference[kRows];  // what the probabilities are relative to, log2 units
  float row_rescale[kRows];  // what the output so far must be multiplied by
};
static_assert(sizeof(SharedMemory) == kSharedBytes, "the spec computes what the struct takes");

// Leaves the work for all threads to read, divides once per row for all tiles to come, and lets
// every row begin without a reference.
__device__ inline void share_work(const Work& work, SharedMemory& shared) {
  if (threadIdx.x == 0) shared.work = work;
  for (int row = static_cast<int>(threadIdx.x); row < kRows; row += kThreads) {
    shared.row_visible[row] = work.visible_tokens(row);
    shared.row_reference[row] = -kInfinity;
  }
}

// Where item `item` arrives, [kTileTokens] rows of kStageRowBytes.
__device__ inline unsigned char* stage_of(SharedMemory& shared, int item) {
  return shared.kv + item % kStages * kStageBytes;
}

// Where it is multiplied from once it is ready, swizzled [kTileTokens][kHeadDimQk].
__device__ inline unsigned char* tokens_of(SharedMemory& shared, int item) {
  return kDecodesTokens ? shared.kv + kStages * kStageBytes : stage_of(shared, item);
}
