// The finder, one warp: finds the work of the block, item by item, ahead of those that do it.

#pragma once

#include "common/params.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/barrier.cuh"
#include "schedule_range.cuh"
#include "shared_memory.cuh"
#include "tile_scheduler.cuh"

// Whether the work may be found before the kernel before has ended: what is read for it then is
// read once more.
__device__ inline bool finds_ahead(const Params& params) {
  return params.cu_seqlens_q == nullptr && requests_of_lane(params) <= kLaneRequests;
}

// Begins before the kernel before has ended. Then lengths are looked at again, while others ask for
// the first page ids and the first query; if that kernel has changed them, all begin anew.
__device__ inline void find_items(const Params& params, SharedMemory& shared) {
  if (!finds_ahead(params)) wait_for_previous_kernel();
  LaneLengths lengths = own_lengths(params);
  Span span;
  WalkState walk;
  bool has_more;
  while (true) {
    has_more = find_span(params, lengths, span, walk);
    shared.items.write(0, has_more ? item_at(params, span, walk) : Item::none());
    barrier_sync(kStartBarrier, kThreads);
    wait_for_previous_kernel();
    const LaneLengths now = own_lengths(params);
    const bool is_right = !__any_sync(~0u, now.differ_from(lengths));
    if (lane_index() == 0) shared.is_start_right = is_right;
    __syncwarp();
    if (is_right) break;
    barrier_sync(kCheckedBarrier, kThreads);  // nobody reads the first item any more
    lengths = now;
  }
  barrier_arrive(kCheckedBarrier, kThreads);
  shared.items.publish(0);
#pragma unroll 1
  for (u32 count = 1; has_more; ++count) {
    has_more = go_on(params, span, walk);
    const Item next = has_more ? item_at(params, span, walk) : Item::none();
    shared.items.await_place(count);
    shared.items.write(count, next);
    shared.items.publish(count);
  }
}
