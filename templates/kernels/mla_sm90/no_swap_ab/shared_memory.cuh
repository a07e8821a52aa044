// The shared memory of a block, whole.

#pragma once

#include "common/barriers.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

constexpr int kStages = 2;  // one for even blocks of tokens, one for odd ones

struct SharedMemoryPlan {
  unsigned char query[kTiles * kQueryTileBytes];
  unsigned char kv[kStages][kTiles * kTileBytes];  // the last tile of a block becomes its P
  unsigned char staging[kConsumerWarps][1024];  // of the output
  float row_max[kStages][kBlockM];  // what a consumer has moved a row's reference to, log2 units
  float rescale[kStages][kBlockM];  // and what that multiplies sums and outputs by
  float row_sum[kStages][kBlockM];  // of each consumer's tokens
  WorkItem work_items[2];
  SchedulerStorage scheduler_storage;
  Barrier tile_full[kStages][kTiles];
  Barrier wg0_empty[kStages];  // the tiles of the left half of the values
  Barrier wg1_empty[kStages];
  Barrier rope_empty[kStages];
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

// By one thread.
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
