// The items of a block, on their way from the warp that finds them to those that work on them.

#pragma once

#include "common/barriers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/fence.cuh"
#include "tile_scheduler.cuh"

// Item `count` of the block, from 0 on, is in place count % kPlaces, for each of the block's kv
// heads. Behind the last one comes one that is none.
struct ItemRing {
  static constexpr u32 kPlaces = 4;
  static constexpr int kReaders = kThreads / kWarpLanes - 1 - (kMergesApart ? 0 : kMergers);

  Item items[kPlaces][kHeads];
  Barrier full[kPlaces];
  Barrier empty[kPlaces];

  // By one lane.
  __device__ void make_barriers() {
    for (u32 place = 0; place < kPlaces; ++place) {
      make_barrier(full[place], 1);
      make_barrier(empty[place], kReaders);
    }
  }

  __device__ static u32 parity_of(u32 count) { return count / kPlaces % 2; }

  __device__ const Item& at(u32 count, int head) const { return items[count % kPlaces][head]; }

  // Whether there is such an item, which must be known.
  __device__ bool has(u32 count) const { return !at(count, 0).is_none(); }

  // Waits until it is known. All warps that read items wait for each of them but the first, of
  // which they learn when they begin.
  __device__ void await(u32 count) const {
    wait_for(full[count % kPlaces], parity_of(count));
    __syncwarp();  // before barriers of whole warps
  }

  // By a whole warp that has read the item for the last time. The place of what comes last is not
  // wanted again.
  __device__ void release(u32 count) const {
    fence_acq_rel_cta();  // else the arrival overtakes reads
    __syncwarp();
    if (lane_index() == 0) arrive_at(empty[count % kPlaces]);
  }

  // By the warp that finds items: those of all heads.
  __device__ void write(u32 count, const Item& first) {
    if (lane_index() < kHeads) {
      Item& target = items[count % kPlaces][lane_index()];
      target = first;
      target.kv_head += lane_index();
    }
    __syncwarp();
  }

  __device__ void await_place(u32 count) const {
    wait_for(empty[count % kPlaces], parity_of(count) ^ 1);
  }

  // Item 0 as well, which nobody awaits: else the next one in its place would seem to be there.
  __device__ void publish(u32 count) const {
    if (lane_index() == 0) arrive_at(full[count % kPlaces]);
  }
};
