// The schedulers, three warps: hand items to all roles, and bring each item's query into shared
// memory.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "load_q.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/barrier.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

constexpr int kSchedulerWarps = 3;
constexpr int kSchedulerThreads = kSchedulerWarps * kWarpLanes;

// By one thread.
__device__ inline void make_item_barriers(const SharedMemory& shared) {
  make_item_barriers(shared, kSchedulerWarps, kItemReaders, kSchedulerWarps);
}

// `walk` is at the first item, whose query consumers bring.
__device__ inline void schedule(const Params& params, const ItemWalk& walk, SharedMemory& shared) {
  const bool walks = warp_index() == kConsumerWarps + 1;  // one of the warps
  const int member = walk.member;
  if (walks) leave_item(walk, shared);
  const int thread = static_cast<int>(threadIdx.x) % 128 - kWarpLanes;
#pragma unroll 1
  for (u32 count = 0;; ++count) {
    const Item& item = shared.items[item_slot(count)];
    wait_for(shared.item_empty[item_slot(count)], item_parity(count) ^ 1);
    if (walks) make_item(params, member, count, shared);
    barrier_sync(kSchedulerBarrier, kSchedulerThreads);
    if (lane_index() == 0) arrive_at(shared.item_full[item_slot(count)]);
    if (item.request < 0) return;
    if (count == 0) continue;
    wait_for(shared.query_empty, query_parity(count) ^ 1);
    begin_query(params, item, shared, thread, kSchedulerThreads);
    finish_query(shared.query_full);
  }
}
