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
constexpr int kStageBytes = kBlockBytes + kQueryTileBytes + kRows * sizeof(float);
constexpr int kOtherBytes = 2048 + kRows * 80;
constexpr int kStagesBytes = kSharedBytes - kTiles * kQueryTileBytes - kOtherBytes;
constexpr int kStages = kStagesBytes / kStageBytes;
constexpr int kSpareBytes = kStagesBytes - kStages * kStageBytes;

// What scores of a row are multiplied by to be log2 units, and what is subtracted then.
struct alignas(8) ScoredRow {
  float factor;
  float reference;
};

struct SharedMemory {
  unsigned char query[kTiles * kQueryTileBytes];
  unsigned char tokens[kStages][kBlockBytes];
  unsigned char probabilities[kStages][kQueryTileBytes];
  unsigned char spare[kSpareBytes];  // room for merging
  float query_scale[kRows];  // what the query in here has been divided by
  alignas(kChunkBytes) ScoredRow rows[kRows];  // of the item whose scores are computed
  float warp_rows[kScorerWarps][kRows];  // the maximum that each warp found for a row
  float rescale[kStages][kRows];  // what a block multiplies the outputs before it by
  float warp_scales[kScorerWarps];  // the largest that each warp found
  float units;  // of that item: what scales of values are multiplied by
  float block_units[kStages];  // and those of a block
  float row_reference[2][kRows];  // of an item, when all its scores are done
  float row_sum[2][kRows];
  // What its outputs are multiplied by to be left as halves; it is read by pairs.
  alignas(sizeof(float2)) float row_scale[2][kRows];
  float row_units[2];  // of an item: what its outputs are in, and sums multiplied by
  UnlistedTokens unlisted[kStages];
  u32 rescales[kStages];  // whether a block multiplies those before it by others than 1
  Item items[2];
  SpanScratch scratch;
  Barrier tokens_full[kStages];
  Barrier tokens_empty[kStages];
  Barrier scores_full[kStages];
  Barrier probabilities_full[kStages];
  Barrier rows_full[2];
  Barrier first_query_full;
  Barrier query_full;
  Barrier query_empty;
  Barrier item_full[2];
  Barrier item_empty[2];
  int has_nonfinite[2];  // of an item
};
// Where pieces are merged, when no item follows.
constexpr int kRoomBytes = sizeof(SharedMemory::query) + sizeof(SharedMemory::tokens) +
                           sizeof(SharedMemory::probabilities) + sizeof(SharedMemory::spare);
static_assert(sizeof(SharedMemory) <= kSharedBytes, "the spec knows what the struct takes");
static_assert(kBlockBytes % 1024 == 0, "tiles are aligned");
static_assert(kSpareBytes % kChunkBytes == 0, "what lies behind it is aligned");

// By one thread. Of those who load, all threads' copies arrive, and what a warp has written.
__device__ inline void make_token_barriers(SharedMemory& shared) {
  for (int stage = 0; stage < kStages; ++stage) {
    make_barrier(shared.tokens_full[stage], kProducerThreads + kLoadingWarps);
    make_barrier(shared.tokens_empty[stage], kConsumerWarps);
    make_barrier(shared.scores_full[stage], kScorerWarps);
    make_barrier(shared.probabilities_full[stage], kScorerWarps);
  }
  for (int slot = 0; slot < 2; ++slot) make_barrier(shared.rows_full[slot], kScorerWarps);
  for (int slot = 0; slot < 2; ++slot) shared.has_nonfinite[slot] = 0;
}
