// Softmax of a KV block for the PV warpgroups, by the QK warpgroup.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "v_scales.cuh"

// Shared scale of a work item, by its slot.
__device__ inline float last_shared_scale(const SharedMemoryPlan& smem, int slot) {
  return smem.row_shared_scale[slot];
}

// Shared scale of the KV block in `stage`, its V scales, and its P.
__device__ inline float shared_scale_of(const SharedMemoryPlan& smem, int stage) {
  return smem.block_scale[stage];
}
__device__ inline u32 probabilities_desc(const SharedMemoryPlan& smem, int buffer) {
  return descriptor_low(shared_address(smem.probabilities[buffer]));
}
__device__ inline u16* v_scales_at(SharedMemoryPlan& smem, int stage, int) {
  return v_scales_of(smem.kv[stage]);
}

// Waits for P, and returns whether O needs a rescale.
__device__ inline bool finish_softmax(const Params&, SharedMemoryPlan& smem, const WorkItem&,
                                      u32 blocks_done, u32 end) {
  const int stage = stage_of<kStages>(blocks_done);
  wait(smem.probabilities_full[stage], phase_of<kStages>(blocks_done));
  if (kDelaysPv && __any_sync(~0u, blocks_done + 1 != end)) {
    wait(smem.scores_full[stage_of<kStages>(blocks_done + 1)], phase_of<kStages>(blocks_done + 1));
  }
  return smem.needs_rescale[stage] != 0;
}

// Waits for the row max of the work item.
__device__ inline void finish_row_max(SharedMemoryPlan& smem, const WorkItem& work) {
  wait(smem.row_state_full[work_slot(work.work_idx)], work_phase(work.work_idx));
}
