// Pairwise combine: of two splits, a CTA has its own in registers and adds the other one.

#pragma once

#include "accumulators.cuh"
#include "combine/partial.cuh"
#include "combine/subtile_frags.cuh"
#include "combine/subtiles.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "store_rows.cuh"
#include "thread_rows.cuh"

// Whether nothing follows this split in its CTA, but something follows the other one: this CTA then
// finishes the work tile alone.
__device__ inline bool is_only_reducer(const WorkItem& work) {
  return work.num_splits == 2 && work.num_reducers == 1 && work.split_idx == 0;
}

__device__ inline void combine_pair(const Params& params, const WorkItem& work,
                                    SharedMemoryPlan& smem, Accumulators& accumulators,
                                    ThreadRows& rows) {
  semaphore_wait(params, work);
  const PartialSlots slots(params, work);
  const CombineSmem combine_smem = combine_smem_of_subtile(smem, work);  // the whole work tile
  load_partial_values(params, slots, combine_smem, 0);
  cp_async_commit_group();
  const RowPairs pairs(params, work, combine_smem, partial_states(params, slots[1]), rows);
  cp_async_wait_group<0>();
  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
  const uint2* values = combine_smem.values(1) + lane_frag_offset();
  constexpr int kFragsPerRowPair = kAccumulators / (kRowsPerThread / 2);
#pragma unroll
  for (int pair = 0; pair < kRowsPerThread / 2; ++pair) {
    const PairWeights a = pairs[pair * 2];
    const PairWeights b = pairs[pair * 2 + 1];
#pragma unroll
    for (int frag = 0; frag < kFragsPerRowPair; ++frag) {
      const int i = accumulator_in_frag_order(pair * kFragsPerRowPair + frag);
      const float4 other = unpack_half4(values[frag_offset(i) * kWarpLanes]);
      const float4 own = weighted(accumulator(accumulators, i), a.own, b.own);
      set_accumulator(accumulators, i, accumulate_frag(own, other, a.other, b.other));
      // Limits the loads in flight: registers are scarce.
      if (frag % kFragsPerStep == kFragsPerStep - 1) __syncwarp();
    }
  }
}
