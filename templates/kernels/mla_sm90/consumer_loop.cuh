// The consumers: all items of the block, one after the other.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "finish_work.cuh"
#include "pipeline/work_pipeline.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

__device__ inline void consume_items(const Params& params, SharedMemory& shared) {
  ConsumerState state(params, shared);
  finish_query(shared.first_query_full);
  u32 count = 0;
  while (true) {
    wait_for(shared.item_full[item_slot(count)], item_parity(count));
    const Item& item = shared.items[item_slot(count)];
    if (item.request < 0) return;
    wait_for_query(shared, count);
    consume_item(params, item, shared, state);
    count = item.count + 1;  // not kept in a register meanwhile
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.item_empty[item_slot(count - 1)]);
  }
}
