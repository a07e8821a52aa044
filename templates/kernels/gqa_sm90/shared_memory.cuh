// The shared memory of a block, whole.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/fence.cuh"
#include "ptx/prefetch.cuh"
#include "work_pipeline.cuh"

// What a warp has of a row, besides values.
struct RowState {
  float reference;  // log2 units; what values and sum are relative to
  float sum;  // of probabilities
};

// Rows of values are 16 bytes longer than their elements, so that a warp that writes its
// accumulators writes to all banks.
constexpr int kMergePitch = kMergeDims + 4;

struct SharedMemory {
  unsigned char tokens[kStages][kTileBytes];  // keys, values, keys, ...
  float merged[kConsumerWarps][kMergeGroups][8][kMergePitch];  // of each warp
  RowState states[kConsumerWarps][kMergeGroups][8];
  // By lanes, as each multiplies it, and what undoes a row's scaling; if it is not in registers.
  uint2 query[kKeepsQuery ? 1 : kRowGroups][kKeepsQuery ? 1 : kDimTiles][kKeepsQuery ? 1 : 32];
  float query_factors[kKeepsQuery ? 1 : kRows];
  ItemRing items;
  bool is_start_right;
  Barrier stage_full[kStages];
  Barrier stage_empty[kStages];
  u32 nonfinite_items[2];  // the count, of each parity, that has values restored
  int is_last_piece;
};
static_assert(sizeof(SharedMemory) <= kSharedBytes, "the spec knows what the struct takes");

// By one warp.
__device__ inline void make_barriers(const Params& params, SharedMemory& shared) {
  if (lane_index() == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      make_barrier(shared.stage_full[stage], 1);
      make_barrier(shared.stage_empty[stage], kConsumerWarps);
    }
    shared.items.make_barriers();
    fence_mbarrier_init();
    shared.nonfinite_items[0] = shared.nonfinite_items[1] = ~0u;
    prefetch_tensormap(&params.key_map);
    prefetch_tensormap(&params.value_map);
  }
  __syncwarp();
}
