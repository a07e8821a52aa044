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
  float row_max;  // log2 units; what values and sum are relative to
  float row_sum;  // of probabilities
};

// Rows of values are 16 bytes longer than their elements, so that a warp that writes its
// accumulators writes to all banks.
constexpr int kCombinePitch = kCombineDims + 4;

struct SharedMemoryPlan {
  unsigned char kv[kStages][kTileBytes];  // keys, values, keys, ...
  float combine_buffer[kConsumerWarps][kCombineRowGroups][8][kCombinePitch];  // of each warp
  RowState states[kConsumerWarps][kCombineRowGroups][8];
  // By lanes, as each multiplies it, and what undoes a row's scaling; if it is not in registers.
  uint2 query[kQueryInRegs ? 1 : kRowGroups][kQueryInRegs ? 1 : kDimTiles][kQueryInRegs ? 1 : 32];
  float query_inverse_scales[kQueryInRegs ? 1 : kBlockM];
  WorkPipeline work_pipeline;
  bool is_first_work_valid;
  Barrier kv_full[kStages];
  Barrier kv_empty[kStages];
  u32 nonfinite_work[2];  // the count, of each parity, that has values restored
  int is_last_split;
};
static_assert(sizeof(SharedMemoryPlan) <= kSharedBytes, "the spec knows what the struct takes");

// By one warp.
__device__ inline void init_barriers(const Params& params, SharedMemoryPlan& smem) {
  if (lane_index() == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(smem.kv_full[stage], 1);
      init_barrier(smem.kv_empty[stage], kConsumerWarps);
    }
    smem.work_pipeline.init_barriers();
    fence_mbarrier_init();
    smem.nonfinite_work[0] = smem.nonfinite_work[1] = ~0u;
    prefetch_tensormap(&params.key_map);
    prefetch_tensormap(&params.value_map);
  }
  __syncwarp();
}
