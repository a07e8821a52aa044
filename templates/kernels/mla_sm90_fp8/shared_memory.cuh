// The shared memory of a block, whole.

#pragma once

#include "common/barriers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

constexpr int kStages = 5;  // blocks of tokens, as many as fit

struct SharedMemoryPlan {
  unsigned char query[kQueryBytes];
  unsigned char kv[kStages][kKvBlockBytes];  // the rope tile of a block becomes its P
  float rescale[kStages][kBlockM];  // what a block multiplies the sums and outputs before it by
  float row_max[2][kBlockM];  // of an item, when all its scores are done; log2 units
  float row_sum[2][kBlockM];
  // What its outputs are multiplied by to be left as halves; it is read by pairs.
  alignas(sizeof(float2)) float row_scale[2][kBlockM];
  u32 rescales[kStages];  // a byte for each warp of the scorer: whether it multiplies by others
                          // than 1
  WorkItem work_items[2];
  SchedulerStorage scheduler_storage;
  Barrier kv_full[kStages];
  Barrier kv_empty[kStages];
  Barrier probabilities_full[kStages];
  Barrier row_state_full[2];
  Barrier first_query_full;
  Barrier query_full;
  Barrier query_empty;
  Barrier work_full[2];
  Barrier work_empty[2];
  int has_nonfinite[2];  // of an item
  float score_scale;  // to log2 units
};
// Where pieces are merged, when no item follows.
constexpr int kCombineSmemBytes = sizeof(SharedMemoryPlan::query) + sizeof(SharedMemoryPlan::kv);
static_assert(sizeof(SharedMemoryPlan) <= kSharedBytes, "the spec knows what the struct takes");
static_assert(kQueryBytes % 1024 == 0 && kKvBlockBytes % 1024 == 0, "swizzled tiles are aligned");

// By one thread.
__device__ inline void init_kv_barriers(SharedMemoryPlan& smem) {
  for (int stage = 0; stage < kStages; ++stage) {
    init_barrier(smem.kv_full[stage], 1);
    init_barrier(smem.kv_empty[stage], kConsumerWarps);
    init_barrier(smem.probabilities_full[stage], kWarpsWithRows);
  }
  for (int stage = 0; stage < 2; ++stage) init_barrier(smem.row_state_full[stage], kWarpsWithRows);
  for (int stage = 0; stage < kStages; ++stage) smem.rescales[stage] = 0;
  for (int stage = 0; stage < 2; ++stage) smem.has_nonfinite[stage] = 0;
}
