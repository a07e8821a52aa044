// Shared-memory plan of a CTA.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/load.cuh"
#include "ptx/sync.cuh"
#include "scheduler/schedule_range.cuh"
#include "softmax/row_state.cuh"
#include "sparse_tokens.cuh"
#include "work_pipeline.cuh"

static_assert(sizeof(RowState) == kRowStateBytes, "the host plans with it");

// Partial O of the consumer warps, of a sub-tile of so many rows, and dims of each part. Rows are
// padded by 16 bytes, so that the accumulator stores of a warp spread over all banks.
template <int kTileRows, int kTileDims>
using CombineBuffer = float[kPartWarps][kTileRows / 8][8][kDimParts * kTileDims + 4];
template <int kTileRows>
using CombineStates = RowState[kPartWarps][kTileRows / 8][8];

// The producer warp arrives for the TMA boxes of a tile, and each of its lanes for scales. Of those
// that gather, each lane arrives for its copies, and each warp for its plain stores.
constexpr int kKvFullArrivals =
    kUsesTma ? 1 + (kHasScales ? kWarpLanes : 0) : kProducerWarps * (kWarpLanes + 1);

struct SharedMemoryPlan {
  unsigned char kv[kStages][kStageBytes];  // K, V, K, ...
  CombineBuffer<kCombineRows, kCombineDims> combine_buffer;
  CombineStates<kCombineRows> states;
  // Q in fragment order, one vector per lane, and the inverse row scales; unless Q is in registers.
  uint2 query[kQueryInRegs ? 1 : kRowGroups][kQueryInRegs ? 1 : kDimTiles][kQueryInRegs ? 1 : 32];
  float query_inverse_scales[kQueryInRegs ? 1 : kBlockM];
  WorkPipeline work_pipeline;
  bool is_first_work_valid;
  Barrier kv_full[kStages];
  Barrier kv_empty[kStages];
  u32 nonfinite_work[2];  // last even and last odd work_idx with non-finite V to restore
  int is_last_split;
  ScheduleRange range;  // of this CTA, for the combine of fixed splits
  SparseTokens::Type sparse_tokens[kStages][kIsSparse ? SparseTokens::kEntries : 1];  // of K
};

// Where a work item is combined.
struct CombineSmem {
  static constexpr int kTileRows = kCombineRows;
  static constexpr int kTileDims = kCombineDims;
  __device__ static auto& outs(SharedMemoryPlan& smem) { return smem.combine_buffer; }
  __device__ static auto& states(SharedMemoryPlan& smem) { return smem.states; }
};

// The same of the last one of a CTA over lists: the KV stages are free then, and all of O is
// combined at once, because that is much of the time of a small call. Not where O has parts: their
// warps have no register for it.
struct LastCombineSmem {
  static constexpr int kTileRows = kBlockM;
  static constexpr int kTileDims = kPartDims;
  struct Plan {
    CombineBuffer<kTileRows, kTileDims> outs;
    CombineStates<kTileRows> states;
  };
  __device__ static auto& outs(SharedMemoryPlan& smem) {
    return reinterpret_cast<Plan&>(smem).outs;
  }
  __device__ static auto& states(SharedMemoryPlan& smem) {
    return reinterpret_cast<Plan&>(smem).states;
  }
};
constexpr bool kCombinesLastAtOnce =
    kIsSparse && !kUsesEpilogueWarps && kDimParts == 1 &&
    sizeof(LastCombineSmem::Plan) <=
        sizeof(SharedMemoryPlan::kv) + sizeof(SharedMemoryPlan::combine_buffer);
static_assert(sizeof(SharedMemoryPlan) <= kSharedBytes, "the spec computes the size of the struct");

// A template: Params of a kernel without TMA lacks the maps.
template <typename TmaParams>
__device__ inline void prefetch_maps(const TmaParams& params) {
  if constexpr (kUsesTma) {
    prefetch_tensormap(&params.key_map);
    prefetch_tensormap(&params.value_map);
  }
}

// Called by one warp, before the first CTA-wide barrier publishes the mbarriers.
__device__ inline void init_barriers(const Params& params, SharedMemoryPlan& smem) {
  if (lane_index() == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(smem.kv_full[stage], kKvFullArrivals);
      init_barrier(smem.kv_empty[stage], kConsumerWarps);
    }
    smem.work_pipeline.init_barriers();
    fence_mbarrier_init();
    smem.nonfinite_work[0] = smem.nonfinite_work[1] = ~0u;
    prefetch_maps(params);
  }
  __syncwarp();
}
