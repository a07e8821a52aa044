// The schedulers, three warps: hand items to all roles, and bring each item's query into shared
// memory. Needs SharedMemory, items.cuh, blocks/barriers.cuh, ptx/barrier.cuh, ptx/cp_async.cuh,
// ptx/fence.cuh; from the family begin_query.

constexpr int kSchedulerWarps = 3;
constexpr int kSchedulerThreads = kSchedulerWarps * kWarpLanes;

// By one thread.
__device__ inline void make_item_barriers(const SharedMemory& shared) {
  make_barrier(shared.first_query_full, kConsumerWarps);
  make_barrier(shared.query_full, kSchedulerWarps);
  make_barrier(shared.query_empty, kQueryReaders);
  for (int slot = 0; slot < 2; ++slot) {
    make_barrier(shared.item_full[slot], kSchedulerWarps);
    make_barrier(shared.item_empty[slot], kItemReaders);
  }
}

__device__ inline void finish_query(const Barrier& full) {
  cp_async_wait_group<0>();
  fence_proxy_async();
  __syncwarp();
  if (lane_index() == 0) arrive_at(full);
}

// Consumers bring the first query themselves: nothing can begin without it.
__device__ inline void begin_first_query(const Params& params, const Part& part,
                                         SharedMemory& shared) {
  begin_query(params, part, shared, static_cast<int>(threadIdx.x), kConsumerThreads);
}

// Goes on from an item; where to is in shared memory meanwhile, for a scheduler has few registers.
__device__ inline void leave_item(ItemWalk& walk, SharedMemory& shared) {
  walk.advance();
  __syncwarp();
  if (lane_index() == 0) shared.scratch.next = walk;
  __syncwarp();
}

__device__ inline void take_next_item(const Params& params, int member, u32 count,
                                      SharedMemory& shared) {
  ItemWalk walk(params, shared.scratch.span, member, shared.scratch.next);
  const Part part = walk.find();
  Item& item = shared.items[item_slot(count)];
  if (part.request >= 0) {
    walk.fill(item, part, count);
    leave_item(walk, shared);
  } else if (lane_index() == 0) {
    item.request = -1;
  }
  __syncwarp();
}

// `walk` is at the first item.
__device__ inline void schedule(const Params& params, ItemWalk& walk, const Part& first,
                                SharedMemory& shared) {
  const bool walks = warp_index() == kConsumerWarps + 1;  // one of the warps
  if (walks) walk.fill(shared.items[0], first, 0);
  __syncwarp();
  if (lane_index() == 0) arrive_at(shared.item_full[0]);
  const int member = walk.member;
  if (walks) leave_item(walk, shared);
  const int thread = static_cast<int>(threadIdx.x) % 128 - kWarpLanes;
  for (u32 count = 1;; ++count) {
    const Item& item = shared.items[item_slot(count)];
    wait_for(shared.item_empty[item_slot(count)], item_parity(count) ^ 1);
    if (walks) take_next_item(params, member, count, shared);
    barrier_sync(kSchedulerBarrier, kSchedulerThreads);
    if (lane_index() == 0) arrive_at(shared.item_full[item_slot(count)]);
    if (item.request < 0) return;
    wait_for(shared.query_empty, query_parity(count) ^ 1);
    begin_query(params, item, shared, thread, kSchedulerThreads);
    finish_query(shared.query_full);
  }
}

// Waits for the query of the item that `count` have preceded.
__device__ inline void wait_for_query(const SharedMemory& shared, u32 count) {
  if (count == 0) {
    wait_for(shared.first_query_full, 0);
  } else {
    wait_for(shared.query_full, query_parity(count) ^ 1);
  }
}
