// The items of a block, on their way from the warp that finds them to those that work on them.

#pragma once

#include "common/barriers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/fence.cuh"
#include "tile_scheduler.cuh"

// Item `work_idx` of the block, from 0 on, is in place count % kWorkStages, for each of the block's
// kv heads. Behind the last one comes one that is none.
struct WorkPipeline {
  static constexpr u32 kWorkStages = 4;
  static constexpr int kConsumers =
      kThreads / kWarpLanes - 1 - (kHasEpilogueWarps ? 0 : kEpilogueWarps);

  WorkItem work_items[kWorkStages][kHeads];
  Barrier full[kWorkStages];
  Barrier empty[kWorkStages];

  // By one lane.
  __device__ void init_barriers() {
    for (u32 stage = 0; stage < kWorkStages; ++stage) {
      init_barrier(full[stage], 1);
      init_barrier(empty[stage], kConsumers);
    }
  }

  __device__ static u32 phase_of(u32 work_idx) { return work_idx / kWorkStages % 2; }

  __device__ const WorkItem& at(u32 work_idx, int head) const {
    return work_items[work_idx % kWorkStages][head];
  }

  // Whether there is such an item, which must be known.
  __device__ bool has(u32 work_idx) const { return !at(work_idx, 0).is_none(); }

  // Waits until it is known. All warps that read items wait for each of them but the first, of
  // which they learn when they begin.
  __device__ void wait_full(u32 work_idx) const {
    wait(full[work_idx % kWorkStages], phase_of(work_idx));
    __syncwarp();  // before barriers of whole warps
  }

  // By a whole warp that has read the item for the last time. The place of what comes last is not
  // wanted again.
  __device__ void release(u32 work_idx) const {
    fence_acq_rel_cta();  // else the arrival overtakes reads
    __syncwarp();
    if (lane_index() == 0) arrive(empty[work_idx % kWorkStages]);
  }

  // By the warp that finds items: those of all heads.
  __device__ void write(u32 work_idx, const WorkItem& first_head) {
    if (lane_index() < kHeads) {
      WorkItem& target = work_items[work_idx % kWorkStages][lane_index()];
      target = first_head;
      target.kv_head += lane_index();
    }
    __syncwarp();
  }

  __device__ void wait_empty(u32 work_idx) const {
    wait(empty[work_idx % kWorkStages], phase_of(work_idx) ^ 1);
  }

  // Item 0 as well, which nobody awaits: else the next one in its place would seem to be there.
  __device__ void publish(u32 work_idx) const {
    if (lane_index() == 0) arrive(full[work_idx % kWorkStages]);
  }
};
