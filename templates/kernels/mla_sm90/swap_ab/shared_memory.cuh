// The shared memory of a block, whole.

#pragma once

#include "common/barriers.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

// Tokens are in a ring of thirds of blocks: three tiles each.
// As many as fit.
constexpr int kStages = kRows == 16 ? 8 : 7;
constexpr int kStageTiles = 3;
constexpr int kBlockStages = kTiles / kStageTiles;

struct SharedMemory {
  unsigned char query[kTiles * kQueryTileBytes];
  unsigned char tokens[kStages][kStageTiles * kTileBytes];
  unsigned char probabilities[2][kQueryTileBytes];  // of a block and of the next
  unsigned char staging[kConsumerWarps][1024];  // of the output
  float warp_rows[kConsumerWarps][kRows];  // what each warp found for a row: maximum, or sum
  Item items[2];
  SpanScratch scratch;
  Barrier stage_full[kStages];
  Barrier stage_empty[kStages];
  Barrier first_query_full;
  Barrier query_full;
  Barrier query_empty;
  Barrier item_full[2];
  Barrier item_empty[2];
  int has_nonfinite;
};
// Where pieces are merged, when no item follows.
constexpr int kRoomBytes = sizeof(SharedMemory::query) + sizeof(SharedMemory::tokens);
static_assert(sizeof(SharedMemory) <= kSharedBytes, "the spec knows what the struct takes");
static_assert(kBlockStages * kStageTiles == kTiles, "a block is whole stages");

// By one thread.
__device__ inline void make_token_barriers(const SharedMemory& shared) {
  for (int stage = 0; stage < kStages; ++stage) {
    make_barrier(shared.stage_full[stage], 1);
    make_barrier(shared.stage_empty[stage], 1);
  }
}
