// Shared memory plan of the CTA.

#pragma once

#include "common/barriers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

constexpr int kStages = 5;  // KV blocks, as many as fit

// P overwrites the rope tile of its stage, if any, in swizzled rows of 64 bytes. The tile is dead
// once the QK GEMM is complete: wgmma.wait_group waits for the MMAs of the whole warpgroup.
constexpr u32 kProbabilitiesOffset = kLatentTiles * kTileBytes;

struct SharedMemoryPlan {
  unsigned char query[kQueryBytes];
  unsigned char kv[kStages][kKvStageBytes];  // P overwrites the rope tile
  float alpha[kStages][kBlockM];  // alpha of the KV block, for O
  float row_max[2][kBlockM];  // of a whole work item, log2 domain
  float row_sum[2][kBlockM];
  // Of O as the epilogue stores it; aligned because rows are read in pairs.
  alignas(sizeof(float2)) float row_scale[2][kBlockM];
  u32 rescale_flags[kStages];  // a byte per QK warp: whether any alpha of its rows is not 1
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
  // Whether a row of the work item attends to a NaN in V. A flag per slot: one PV warpgroup may
  // reach the next work item before the other resets the flag of this one.
  int has_nonfinite[2];
  float score_scale;  // to the log2 domain
};
// The split reduction aliases Q and KV: a CTA combines after its last work item only.
constexpr int kCombineSmemBytes = sizeof(SharedMemoryPlan::query) + sizeof(SharedMemoryPlan::kv);
static_assert(sizeof(SharedMemoryPlan) <= kSharedBytes, "the spec states the size of the plan");
static_assert(kQueryBytes % 1024 == 0 && kKvStageBytes % 1024 == 0, "swizzled tiles are aligned");

__device__ inline int& nonfinite_flag(SharedMemoryPlan& smem, const WorkItem& work) {
  return smem.has_nonfinite[work_slot(work.work_idx)];
}

// Called by one thread.
__device__ inline void init_kv_barriers(SharedMemoryPlan& smem) {
  for (int stage = 0; stage < kStages; ++stage) {
    init_barrier(smem.kv_full[stage], 1);
    init_barrier(smem.kv_empty[stage], kPvWarps);
    init_barrier(smem.probabilities_full[stage], kWarpsWithRows);
  }
  for (int stage = 0; stage < 2; ++stage) init_barrier(smem.row_state_full[stage], kWarpsWithRows);
  for (int stage = 0; stage < kStages; ++stage) smem.rescale_flags[stage] = 0;
  for (int stage = 0; stage < 2; ++stage) smem.has_nonfinite[stage] = 0;
}
