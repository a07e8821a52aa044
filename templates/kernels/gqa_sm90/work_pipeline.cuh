// Work pipeline: the scheduler warp publishes work items to the producer, consumer and epilogue
// warps through shared memory.

#pragma once

#include "common/barriers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/sync.cuh"
#include "work_item.cuh"

// Work item `work_idx` of the CTA occupies stage work_idx % kWorkStages, one entry per kv head. An
// empty item follows the last one.
struct WorkPipeline {
  static constexpr u32 kWorkStages = 4;
  static constexpr int kEmptyArrivals =
      kThreads / kWarpLanes - 1 - (kUsesEpilogueWarps ? 0 : kEpilogueWarps);

  WorkItem work_items[kWorkStages][kKvHeadsPerCta];
  Barrier full[kWorkStages];
  Barrier empty[kWorkStages];

  // Called by one lane.
  __device__ void init_barriers() {
    for (u32 stage = 0; stage < kWorkStages; ++stage) {
      init_barrier(full[stage], 1);
      init_barrier(empty[stage], kEmptyArrivals);
    }
  }

  __device__ const WorkItem& at(u32 work_idx, int head) const {
    return work_items[work_idx % kWorkStages][head];
  }

  // Whether there is such an item; its stage must be full.
  __device__ bool has(u32 work_idx) const { return !at(work_idx, 0).is_none(); }

  // Waits until the item is published. All reading warps wait for every item but the first, which a
  // named barrier publishes.
  __device__ void wait_full(u32 work_idx) const {
    wait(full[work_idx % kWorkStages], phase_of<kWorkStages>(work_idx));
    __syncwarp();  // reconverge before warp-wide barriers
  }

  // Called by a whole warp after its last read of the item. Stages that no later item reuses need
  // no release.
  __device__ void release(u32 work_idx) const {
    fence_acq_rel_cta();  // otherwise the arrival overtakes reads
    __syncwarp();
    if (lane_index() == 0) arrive(empty[work_idx % kWorkStages]);
  }

  // Called by the scheduler warp: writes the entries of all kv heads.
  __device__ void write(u32 work_idx, const WorkItem& first_head) {
    if (lane_index() < kKvHeadsPerCta) {
      WorkItem& target = work_items[work_idx % kWorkStages][lane_index()];
      target = first_head;
      target.kv_head += lane_index();
    }
    __syncwarp();
  }

  __device__ void wait_empty(u32 work_idx) const {
    wait(empty[work_idx % kWorkStages], phase_of<kWorkStages>(work_idx) ^ 1);
  }

  // Also for item 0, which no warp waits for: without it, the phase of item kWorkStages would be
  // off by one.
  __device__ void publish(u32 work_idx) const {
    if (lane_index() == 0) arrive(full[work_idx % kWorkStages]);
  }
};
