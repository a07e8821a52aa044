// Epilogue of a work item: stores final rows, or publishes a partial and combines splits.

#pragma once

#include "accumulators.cuh"
#include "combine/pairwise.cuh"
#include "combine/partial.cuh"
#include "combine/partial_out.cuh"
#include "combine/reduce_group.cuh"
#include "combine/subtiles.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/exit.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/restore_nonfinite.cuh"
#include "softmax/row_state.cuh"
#include "store_rows.cuh"

__device__ inline void store_partial(const Params& params, const WorkItem& work,
                                     SharedMemoryPlan& smem, const ReduceGroup& reduce_group,
                                     const CombineSmem& combine_smem,
                                     const Accumulators& accumulators, const ThreadRows& rows) {
  const PartialOut target(params, work, combine_smem);
  write_partial(params, work, smem, reduce_group, target, accumulators, rows);
  if (!nonfinite_flag(smem, work)) return;
  restore_nonfinite<Fp16>(params, work, 1.0f,
                          [&](int i, int c) { return reinterpret_cast<u16*>(target.slot(i)) + c; });
}

__device__ inline void store_final(const Params& params, const WorkItem& work,
                                   SharedMemoryPlan& smem, const Accumulators& accumulators,
                                   const ThreadRows& rows) {
  store_rows(params, work, smem, accumulators, rows);
  if (!nonfinite_flag(smem, work)) return;
  restore_nonfinite<Element>(params, work, output_scale(params), [&](int i, int c) {
    const int warp = reload_warp();
    return params.out + global_row(params, work, element_row(warp, i, c)) * kHeadDimVo +
           element_dim(warp, i, c);
  });
}

// Two splits that are both the last item of their CTA are combined by both CTAs: each keeps one
// half of the accumulators and publishes the other. Of any other two splits the first CTA keeps its
// own. With more splits each CTA publishes everything but the sub-tile that it reduces itself.
__device__ inline void epilogue(const Params& params, const WorkItem& work, SharedMemoryPlan& smem,
                                Accumulators& accumulators, ThreadRows& rows) {
  const bool is_pairwise = work.num_splits == 2 && work.num_reducers == 2;
  const int half = half_of_warp(reload_warp());
  const ReduceGroup reduce_group = {is_pairwise ? half : -1};
  const bool finishes =
      is_pairwise ? half == work.split_idx : work.split_idx == 0 && work.num_splits <= 2;
  if (finishes) {
    if (work.num_splits > 1) combine_pair(params, work, smem, reduce_group, accumulators, rows);
    store_final(params, work, smem, accumulators, rows);
  } else {
    const CombineSmem combine_smem = combine_smem_of_subtile(smem, work);
    store_partial(params, work, smem, reduce_group, combine_smem, accumulators, rows);
    semaphore_arrive(params, work, reduce_group);
    if (work.num_splits > 2 && work.split_idx < work.num_reducers) {
      combine_subtiles(params, work, smem, combine_smem);
      exit_if(work.num_splits);  // the last item of this CTA
    }
  }
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  if (reload_tid() == 0) nonfinite_flag(smem, work) = 0;
}
