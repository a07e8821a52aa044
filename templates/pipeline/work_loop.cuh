// Work loop of a consumer warpgroup: processes the work items of the CTA in order.

#pragma once

#include "common/barriers.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "ptx/mov.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

// `process` takes a work item and its index. `kReloadsIndex` makes the index opaque: otherwise
// compilers may hold the address of the work item during the mainloop.
template <bool kReloadsIndex = false, typename Process>
__device__ inline void work_loop(SharedMemoryPlan& smem, Process process) {
  u32 work_idx = 0;
  while (true) {
    wait(smem.work_full[work_slot(work_idx)], work_phase(work_idx));
    const WorkItem* work = &smem.work_items[work_slot(work_idx)];
    if (work->seq_idx < 0) return;
    if constexpr (kReloadsIndex) {
      mov_b32(work_idx);
      work = &smem.work_items[work_slot(work_idx)];
    }
    process(*work, work_idx);
    work_idx = work->work_idx + 1;  // reloaded, so that the mainloop holds no register for it
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.work_empty[work_slot(work_idx - 1)]);
  }
}
