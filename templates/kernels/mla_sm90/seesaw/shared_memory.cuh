// Shared memory plan of the CTA, seesaw: two stages, a KV block each.

#pragma once

#include "common/barriers.cuh"
#include "common/block_table.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

// A KV stage is a KV block: stage 0 for even ones, stage 1 for odd ones. Its last tile has the rope
// part of K, if there is one, and then P.
constexpr int kStages = 2;
constexpr int kStageTiles = kLatentTiles + 1;
// Tiles that arrive together, from every such tile on: a gather copies the half of a warpgroup.
constexpr int kTilesPerArrival = kIsSparse ? kLatentTiles / 2 : 1;

struct SharedMemoryPlan {
  unsigned char query[kTiles * kQueryTileBytes];
  unsigned char kv[kStages][kStageTiles * kTileBytes];  // P overwrites the rope tile
  unsigned char staging[kPvWarps][1024];  // of the output
  float row_max[kStages][kBlockM];  // as updated by the stage's warpgroup, log2 domain
  float alpha[kStages][kBlockM];  // alpha of that update, for l and O
  float row_sum[kStages][kBlockM];  // over each warpgroup's tokens
  WorkItem work_items[2];
  SchedulerStorage scheduler_storage;
  Barrier tile_full[kStages][kTiles];  // every kTilesPerArrival-th is used
  // The V tiles of a warpgroup's half of the output dims, and the other warpgroup's P.
  Barrier wg0_empty[kStages];
  Barrier wg1_empty[kStages];
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
    for (int tile = 0; tile < kTiles; tile += kTilesPerArrival)
      init_barrier(smem.tile_full[stage][tile], kCopyArrivals);
    init_barrier(smem.wg0_empty[stage], 1);
    init_barrier(smem.wg1_empty[stage], 1);
  }
}
