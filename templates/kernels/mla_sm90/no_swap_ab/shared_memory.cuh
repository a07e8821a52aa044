// Shared memory plan of the CTA.

#pragma once

#include "common/barriers.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

constexpr int kStages = 2;  // stage 0 for even KV blocks, stage 1 for odd ones

struct SharedMemoryPlan {
  unsigned char query[kTiles * kQueryTileBytes];
  unsigned char kv[kStages][kTiles * kTileBytes];  // P overwrites the rope tile
  unsigned char staging[kConsumerWarps][1024];  // of the output
  float row_max[kStages][kBlockM];  // as updated by the stage's warpgroup, log2 domain
  float rescale[kStages][kBlockM];  // alpha of that update, for l and O
  float row_sum[kStages][kBlockM];  // over each warpgroup's tokens
  WorkItem work_items[2];
  SchedulerStorage scheduler_storage;
  Barrier tile_full[kStages][kTiles];
  Barrier wg0_empty[kStages];  // the V tiles of warpgroup 0's half of the output dims
  Barrier wg1_empty[kStages];
  Barrier rope_empty[kStages];
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

// Called by one thread.
__device__ inline void init_kv_barriers(const SharedMemoryPlan& smem) {
  for (int stage = 0; stage < kStages; ++stage) {
    for (int tile = 0; tile < kTiles; ++tile) {
      init_barrier(smem.tile_full[stage][tile], 1);
    }
    init_barrier(smem.wg0_empty[stage], 1);
    init_barrier(smem.wg1_empty[stage], 1);
    init_barrier(smem.rope_empty[stage], 1);
  }
}
