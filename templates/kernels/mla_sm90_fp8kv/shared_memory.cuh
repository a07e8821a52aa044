// The shared memory of a block, whole.

#pragma once

#include "common/barriers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "invalid_mask.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

// Blocks of tokens, as many as fit beside the query and what else there is: no more than twenty
// words a row and 2 KiB.
constexpr int kStageBytes = kKvBlockBytes + kQueryTileBytes + kBlockM * sizeof(float);
constexpr int kOtherBytes = 2048 + kBlockM * 80;
constexpr int kStagesBytes = kSharedBytes - kTiles * kQueryTileBytes - kOtherBytes;
constexpr int kStages = kStagesBytes / kStageBytes;
constexpr int kSpareBytes = kStagesBytes - kStages * kStageBytes;

// What scores of a row are multiplied by to be log2 units, and what is subtracted then.
struct alignas(8) SoftmaxRow {
  float factor;
  float row_max;
};

struct SharedMemoryPlan {
  unsigned char query[kTiles * kQueryTileBytes];
  unsigned char kv[kStages][kKvBlockBytes];
  unsigned char probabilities[kStages][kQueryTileBytes];
  unsigned char spare[kSpareBytes];  // room for merging
  float query_scale[kBlockM];  // what the query in here has been divided by
  alignas(kChunkBytes) SoftmaxRow rows[kBlockM];  // of the item whose scores are computed
  float warp_rows[kQkWarps][kBlockM];  // the maximum that each warp found for a row
  float rescale[kStages][kBlockM];  // what a block multiplies the outputs before it by
  float warp_scales[kQkWarps];  // the largest that each warp found
  float shared_scale;  // of that item: what scales of values are multiplied by
  float block_scale[kStages];  // and those of a block
  float row_max[2][kBlockM];  // of an item, when all its scores are done
  float row_sum[2][kBlockM];
  // What its outputs are multiplied by to be left as halves; it is read by pairs.
  alignas(sizeof(float2)) float row_scale[2][kBlockM];
  float row_shared_scale[2];  // of an item: what its outputs are in, and sums multiplied by
  InvalidMask invalid_mask[kStages];
  u32 rescales[kStages];  // whether a block multiplies those before it by others than 1
  WorkItem work_items[2];
  SchedulerStorage scheduler_storage;
  Barrier kv_full[kStages];
  Barrier kv_empty[kStages];
  Barrier scores_full[kStages];
  Barrier probabilities_full[kStages];
  Barrier row_state_full[2];
  Barrier first_query_full;
  Barrier query_full;
  Barrier query_empty;
  Barrier work_full[2];
  Barrier work_empty[2];
  int has_nonfinite[2];  // of an item
};
// Where pieces are merged, when no item follows.
constexpr int kCombineSmemBytes = sizeof(SharedMemoryPlan::query) + sizeof(SharedMemoryPlan::kv) +
                                  sizeof(SharedMemoryPlan::probabilities) +
                                  sizeof(SharedMemoryPlan::spare);
static_assert(sizeof(SharedMemoryPlan) <= kSharedBytes, "the spec knows what the struct takes");
static_assert(kKvBlockBytes % 1024 == 0, "tiles are aligned");
static_assert(kSpareBytes % kChunkBytes == 0, "what lies behind it is aligned");

// By one thread. Of those who load, all threads' copies arrive, and what a warp has written.
__device__ inline void init_kv_barriers(SharedMemoryPlan& smem) {
  for (int stage = 0; stage < kStages; ++stage) {
    init_barrier(smem.kv_full[stage], kProducerThreads + kLoadWarps);
    init_barrier(smem.kv_empty[stage], kConsumerWarps);
    init_barrier(smem.scores_full[stage], kQkWarps);
    init_barrier(smem.probabilities_full[stage], kQkWarps);
  }
  for (int stage = 0; stage < 2; ++stage) init_barrier(smem.row_state_full[stage], kQkWarps);
  for (int stage = 0; stage < 2; ++stage) smem.has_nonfinite[stage] = 0;
}
