// Shared memory plan of the CTA.

#pragma once

#include "common/barriers.cuh"
#include "common/block_table.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

// A stage is a KV block with its P and alpha; as many as fit beside Q and everything else, which is
// at most 20 words per row and 2 KiB. If the PV warpgroups have the softmax, scores of one KV
// block, and P and V scales of two, lie beside the stages.
constexpr int kScoresBytes = kBlockM * kBlockN * sizeof(float);
constexpr int kVScalesBytes = kBlockN * kTokenScaleBytes;
constexpr int kStageBytes =
    kKvBlockBytes + (kPvHasSoftmax ? 0 : kQueryTileBytes) + kBlockM * sizeof(float);
constexpr int kBesideBytes =
    kPvHasSoftmax ? 2 * kQueryTileBytes + kScoresBytes + 2 * kVScalesBytes : 0;
constexpr int kOtherBytes = 2048 + kBlockM * 80;
constexpr int kStagesBytes = kSharedBytes - kTiles * kQueryTileBytes - kOtherBytes;
constexpr int kStages = (kStagesBytes - kBesideBytes) / kStageBytes;
constexpr int kPBuffers = kPvHasSoftmax ? 2 : kStages;
constexpr int kSpareBytes =
    kStagesBytes - kStages * kStageBytes - (kPvHasSoftmax ? kPBuffers * kQueryTileBytes : 0);

// Slots of query scales: PV warps that have the softmax read those of a work item while the QK
// warps convert Q of the next one.
constexpr int kQueryScaleSlots = kPvHasSoftmax ? 2 : 1;
constexpr int kSoftmaxWarps = kPvHasSoftmax ? kPvWarps : kQkWarps;

// Softmax of a row: scale of its scores to the log2 domain, and the stale row max in the log2
// domain.
struct alignas(8) SoftmaxRow {
  float score_scale;
  float row_max;
};

struct SharedMemoryPlan {
  unsigned char query[kTiles * kQueryTileBytes];
  unsigned char kv[kStages][kKvBlockBytes];
  unsigned char probabilities[kPBuffers][kQueryTileBytes];
  unsigned char spare[kSpareBytes];  // for the split reduction; scores, then V scales
  float query_scale[kQueryScaleSlots][kBlockM];  // dequantization scale of the rows of Q
  alignas(kChunkBytes) SoftmaxRow rows[kBlockM];  // of the work item in the softmax
  float warp_row_max[kQkWarps][kBlockM];  // each warp's maximum of a row
  float alpha[kStages][kBlockM];  // alpha of the KV block, for O and l
  float warp_scale_amax[kSoftmaxWarps];  // each warp's amax of the V scales
  float shared_scale;  // power of two on the V scales, of the work item in the softmax
  float block_scale[kStages];  // `shared_scale` as of the KV block
  float row_max[2][kBlockM];  // of a whole work item
  float row_sum[2][kBlockM];
  // Of O as the epilogue stores it; aligned because rows are read in pairs.
  alignas(sizeof(float2)) float row_scale[2][kBlockM];
  float row_shared_scale[2];  // `shared_scale` as of a whole work item, a factor of O and l
  InvalidMask invalid_mask[kStages];
  u32 needs_rescale[kStages];  // whether the KV block has an alpha other than 1
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
  // Whether a row of the work item attends to a NaN/Inf in V. A flag per slot: one PV warpgroup may
  // reach the next work item before the other resets the flag of this one.
  int has_nonfinite[2];
  Barrier scores_empty;  // of PV warps that have the softmax
};
// The split reduction aliases Q, KV and P: a CTA combines after its last work item only.
constexpr int kCombineSmemBytes = sizeof(SharedMemoryPlan::query) + sizeof(SharedMemoryPlan::kv) +
                                  sizeof(SharedMemoryPlan::probabilities) +
                                  sizeof(SharedMemoryPlan::spare);
static_assert(sizeof(SharedMemoryPlan) <= kSharedBytes, "the spec states the size of the plan");
static_assert(kKvBlockBytes % 1024 == 0, "tiles are aligned");
static_assert(kSpareBytes % kChunkBytes == 0, "the members after it are aligned");

__device__ inline int& nonfinite_flag(SharedMemoryPlan& smem, const WorkItem& work) {
  return smem.has_nonfinite[work_slot(work.work_idx)];
}

// Called by one thread. On `kv_full`, each producer thread arrives for its asynchronous copies, and
// each producer warp for its plain stores.
__device__ inline void init_kv_barriers(SharedMemoryPlan& smem) {
  for (int stage = 0; stage < kStages; ++stage) {
    init_barrier(smem.kv_full[stage], kProducerThreads + kProducerWarps);
    init_barrier(smem.kv_empty[stage], kPvWarps);
    init_barrier(smem.scores_full[stage], kQkWarps);
    init_barrier(smem.probabilities_full[stage], kQkWarps);
  }
  if constexpr (kPvHasSoftmax) init_barrier(smem.scores_empty, kPvWarps);
  for (int stage = 0; stage < 2; ++stage) init_barrier(smem.row_state_full[stage], kQkWarps);
  for (int stage = 0; stage < 2; ++stage) smem.has_nonfinite[stage] = 0;
}
