// Pairwise combine: a work tile with two splits, one of which is still in registers.

#pragma once

#include "accumulate_partial.cuh"
#include "accumulators.cuh"
#include "combine/partial.cuh"
#include "combine/partial_out.cuh"
#include "combine/reduce_group.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

static_assert(kBlockM * sizeof(PartialState) + kNumFrags * kFragBytes <= kCombineSmemBytes,
              "the other split of a pair fits");

// Combines the other split into this one: by the first CTA, or by both CTAs, each for the half of
// the accumulators that it keeps.
__device__ inline void combine_pair(const Params& params, const WorkItem& work,
                                    SharedMemoryPlan& smem, const ReduceGroup& reduce_group,
                                    Accumulators& accumulators, ThreadRows& rows) {
  semaphore_wait(params, work, reduce_group);
  const int num_frags = reduce_group.half < 0 ? kNumFrags : kNumFrags / 2;
  const CombineSmem combine_smem = {
      smem.query, 1, 0, kBlockM, max(reduce_group.half, 0) * num_frags, num_frags};
  const PartialSlots slots(params, work);
  const int row = reduce_group.thread_idx();
  if (row < kBlockM) {
    cp_async_cg_16(shared_address(&combine_smem.state(0, row)),
                   partial_states(params, slots[1 - work.split_idx]) + row, kChunkBytes);
  }
  load_partial_values(params, slots, reduce_group, combine_smem, 1 - work.split_idx,
                      work.split_idx);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  reduce_group.sync();
  accumulate_partial(reduce_group, combine_smem, accumulators, rows);
}
