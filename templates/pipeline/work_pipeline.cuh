// What all roles need to hand items and queries on.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "load_q.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

// By one thread. How many warps say that an item is there, read it, and bring queries.
__device__ inline void make_item_barriers(const SharedMemory& shared, int tellers, int readers,
                                          int query_warps) {
  make_barrier(shared.first_query_full, kConsumerWarps);
  make_barrier(shared.query_full, query_warps);
  make_barrier(shared.query_empty, kQueryReaders);
  for (int slot = 0; slot < 2; ++slot) {
    make_barrier(shared.item_full[slot], tellers);
    make_barrier(shared.item_empty[slot], readers);
  }
}

__device__ inline void finish_query(const Barrier& full) {
  cp_async_wait_group<0>();
  fence_proxy_async();
  __syncwarp();
  if (fresh_lane() == 0) arrive_at(full);
}

// Consumers bring the first query themselves: nothing can begin without it.
__device__ inline void begin_first_query(const Params& params, const Part& part,
                                         SharedMemory& shared) {
  begin_query(params, part, shared, static_cast<int>(threadIdx.x), kConsumerThreads);
}

// Keeps in shared memory where the walk is, for a scheduler has few registers.
__device__ inline void leave_item(const ItemWalk& walk, SharedMemory& shared) {
  __syncwarp();
  if (fresh_lane() == 0) shared.scratch.now = walk;
  __syncwarp();
}

// Makes the item that `count` have preceded; the walk stays at the first, where it is left.
__device__ inline void make_item(const Params& params, int member, u32 count,
                                 SharedMemory& shared) {
  ItemWalk walk(params, shared.scratch.span, member, shared.scratch.now);
  const Part part = walk.next(count == 0);
  Item& item = shared.items[item_slot(count)];
  if (part.request >= 0) {
    walk.fill(item, part, count);
    leave_item(walk, shared);
  } else if (fresh_lane() == 0) {
    item.request = -1;
  }
  __syncwarp();
}

// For those who load: done with the item that `count` have preceded; what the next is about.
__device__ inline Part next_part(SharedMemory& shared, u32& count) {
  __syncwarp();  // all lanes have read it
  if (fresh_lane() == 0) arrive_at(shared.item_empty[item_slot(count)]);
  ++count;
  wait_for(shared.item_full[item_slot(count)], item_parity(count));
  return shared.items[item_slot(count)];
}

// Waits for the query of the item that `count` have preceded.
__device__ inline void wait_for_query(const SharedMemory& shared, u32 count) {
  if (count == 0) {
    wait_for(shared.first_query_full, 0);
  } else {
    wait_for(shared.query_full, query_parity(count) ^ 1);
  }
}
