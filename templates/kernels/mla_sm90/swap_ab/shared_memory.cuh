// Shared memory plan of the CTA, swap-AB: stages of some tiles.

#pragma once

#include "common/barriers.cuh"
#include "common/block_table.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

// A KV stage is a third of the tiles of a KV block, or half of them without rope.
constexpr int kStages = (kBlockM == 16 ? 24 : 21) / kTilesPerStage;  // as many as fit

struct SharedMemoryPlan {
  unsigned char query[kTiles * kQueryTileBytes];
  unsigned char kv[kStages][kTilesPerStage * kTileBytes];
  unsigned char probabilities[2][kQueryTileBytes];  // P, double-buffered
  unsigned char staging[kPvWarps][1024];  // of the output
  float warp_rows[kPvWarps][kBlockM];  // each warp's maximum, or sum, of a row
  WorkItem work_items[2];
  SchedulerStorage scheduler_storage;
  Barrier kv_full[kStages];
  Barrier kv_empty[kStages];
  Barrier first_query_full;
  Barrier query_full;
  Barrier query_empty;
  Barrier work_full[2];
  Barrier work_empty[2];
  int has_nonfinite;  // whether a row of the work item attends to a cleared element of V
  InvalidMask invalid_mask[kStages];  // of a KV block, at its first stage; for top-k indices only
};
// The split reduction aliases Q and KV: a CTA combines after its last work item only.
constexpr int kCombineSmemBytes = sizeof(SharedMemoryPlan::query) + sizeof(SharedMemoryPlan::kv);
static_assert(sizeof(SharedMemoryPlan) <= kSharedBytes, "the spec states the size of the plan");

__device__ inline int& nonfinite_flag(SharedMemoryPlan& smem, const WorkItem&) {
  return smem.has_nonfinite;
}

// Called by one thread.
__device__ inline void init_kv_barriers(const SharedMemoryPlan& smem) {
  for (int stage = 0; stage < kStages; ++stage) {
    init_barrier(smem.kv_full[stage], kCopyArrivals);
    init_barrier(smem.kv_empty[stage], 1);
  }
}
