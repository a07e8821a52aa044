// The shared memory of a block, whole.

#pragma once

#include "common/barriers.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

constexpr int kStages = 2;  // one for even blocks of tokens, one for odd ones

struct SharedMemory {
  unsigned char query[kTiles * kQueryTileBytes];
  unsigned char tokens[kStages][kTiles * kTileBytes];  // the last tile of a block becomes its P
  unsigned char staging[kConsumerWarps][1024];  // of the output
  float reference[kStages][kRows];  // what a consumer has moved a row's reference to, log2 units
  float rescale[kStages][kRows];  // and what that multiplies sums and outputs by
  float row_sum[kStages][kRows];  // of each consumer's tokens
  Item items[2];
  SpanScratch scratch;
  Barrier tile_full[kStages][kTiles];
  Barrier left_empty[kStages];  // the tiles of the left half of the values
  Barrier right_empty[kStages];
  Barrier rope_empty[kStages];
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

// By one thread.
__device__ inline void make_token_barriers(const SharedMemory& shared) {
  for (int stage = 0; stage < kStages; ++stage) {
    for (int tile = 0; tile < kTiles; ++tile) {
      make_barrier(shared.tile_full[stage][tile], 1);
    }
    make_barrier(shared.left_empty[stage], 1);
    make_barrier(shared.right_empty[stage], 1);
    make_barrier(shared.rope_empty[stage], 1);
  }
}
