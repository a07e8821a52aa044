// The shared memory of a block, whole.

#pragma once

#include "common/barriers.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

// Tokens are in a ring of thirds of blocks: three tiles each.
// As many as fit.
constexpr int kStages = kBlockM == 16 ? 8 : 7;
constexpr int kTilesPerStage = 3;
constexpr int kStagesPerBlock = kTiles / kTilesPerStage;

struct SharedMemoryPlan {
  unsigned char query[kTiles * kQueryTileBytes];
  unsigned char kv[kStages][kTilesPerStage * kTileBytes];
  unsigned char probabilities[2][kQueryTileBytes];  // of a block and of the next
  unsigned char staging[kConsumerWarps][1024];  // of the output
  float warp_rows[kConsumerWarps][kBlockM];  // what each warp found for a row: maximum, or sum
  WorkItem work_items[2];
  SchedulerStorage scheduler_storage;
  Barrier kv_full[kStages];
  Barrier kv_empty[kStages];
  Barrier first_query_full;
  Barrier query_full;
  Barrier query_empty;
  Barrier work_full[2];
  Barrier work_empty[2];
  int has_nonfinite;
};
// Where pieces are merged, when no item follows.
constexpr int kCombineSmemBytes = sizeof(SharedMemoryPlan::query) + sizeof(SharedMemoryPlan::kv);
static_assert(sizeof(SharedMemoryPlan) <= kSharedBytes, "the spec knows what the struct takes");
static_assert(kStagesPerBlock * kTilesPerStage == kTiles, "a block is whole stages");

// By one thread.
__device__ inline void init_kv_barriers(const SharedMemoryPlan& smem) {
  for (int stage = 0; stage < kStages; ++stage) {
    init_barrier(smem.kv_full[stage], 1);
    init_barrier(smem.kv_empty[stage], 1);
  }
}
