// The shared memory of a block, whole.

#pragma once

#include "common/barriers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

constexpr int kStages = 5;  // blocks of tokens, as many as fit

struct SharedMemory {
  unsigned char query[kQueryBytes];
  unsigned char tokens[kStages][kBlockBytes];  // the rope tile of a block becomes its P
  float rescale[kStages][kRows];  // what a block multiplies the sums and outputs before it by
  float row_reference[2][kRows];  // of an item, when all its scores are done; log2 units
  float row_sum[2][kRows];
  // What its outputs are multiplied by to be left as halves; it is read by pairs.
  alignas(sizeof(float2)) float row_scale[2][kRows];
  u32 rescales[kStages];  // a byte for each warp of the scorer: whether it multiplies by others
                          // than 1
  Item items[2];
  SpanScratch scratch;
  Barrier tokens_full[kStages];
  Barrier tokens_empty[kStages];
  Barrier probabilities_full[kStages];
  Barrier rows_full[2];
  Barrier first_query_full;
  Barrier query_full;
  Barrier query_empty;
  Barrier item_full[2];
  Barrier item_empty[2];
  int has_nonfinite[2];  // of an item
  float score_scale;  // to log2 units
};
// Where pieces are merged, when no item follows.
constexpr int kRoomBytes = sizeof(SharedMemory::query) + sizeof(SharedMemory::tokens);
static_assert(sizeof(SharedMemory) <= kSharedBytes, "the spec knows what the struct takes");
static_assert(kQueryBytes % 1024 == 0 && kBlockBytes % 1024 == 0, "swizzled tiles are aligned");

// By one thread.
__device__ inline void make_token_barriers(SharedMemory& shared) {
  for (int stage = 0; stage < kStages; ++stage) {
    make_barrier(shared.tokens_full[stage], 1);
    make_barrier(shared.tokens_empty[stage], kConsumerWarps);
    make_barrier(shared.probabilities_full[stage], kWarpsWithRows);
  }
  for (int slot = 0; slot < 2; ++slot) make_barrier(shared.rows_full[slot], kWarpsWithRows);
  for (int stage = 0; stage < kStages; ++stage) shared.rescales[stage] = 0;
  for (int slot = 0; slot < 2; ++slot) shared.has_nonfinite[slot] = 0;
}
