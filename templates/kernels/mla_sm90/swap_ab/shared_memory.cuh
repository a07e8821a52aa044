// Shared memory plan of the CTA, swap-AB.

#pragma once

#include "common/barriers.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

// A KV stage is three of the nine tiles of a KV block.
constexpr int kStages = kBlockM == 16 ? 8 : 7;  // as many as fit
constexpr int kTilesPerStage = 3;
constexpr int kStagesPerBlock = kTiles / kTilesPerStage;

struct SharedMemoryPlan {
  unsigned char query[kTiles * kQueryTileBytes];
  unsigned char kv[kStages][kTilesPerStage * kTileBytes];
  unsigned char probabilities[2][kQueryTileBytes];  // P, double-buffered
  unsigned char staging[kConsumerWarps][1024];  // of the output
  float warp_rows[kConsumerWarps][kBlockM];  // each warp's maximum, or sum, of a row
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
// The split reduction aliases Q and KV: a CTA combines after its last work item only.
constexpr int kCombineSmemBytes = sizeof(SharedMemoryPlan::query) + sizeof(SharedMemoryPlan::kv);
static_assert(sizeof(SharedMemoryPlan) <= kSharedBytes, "the spec states the size of the plan");
static_assert(kStagesPerBlock * kTilesPerStage == kTiles, "a KV block is whole stages");

// Called by one thread.
__device__ inline void init_kv_barriers(const SharedMemoryPlan& smem) {
  for (int stage = 0; stage < kStages; ++stage) {
    init_barrier(smem.kv_full[stage], 1);
    init_barrier(smem.kv_empty[stage], 1);
  }
}
