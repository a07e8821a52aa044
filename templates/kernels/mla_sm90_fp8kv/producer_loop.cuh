// Those who load: one of them hands items on, all bring each item's query and tokens.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "load_kv.cuh"
#include "load_q.cuh"
#include "pipeline/work_pipeline.cuh"
#include "prepare_q.cuh"
#include "ptx/mov.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

// By one thread.
__device__ inline void make_item_barriers(const SharedMemory& shared) {
  make_item_barriers(shared, 1, kItemReaders, kLoadingWarps);
}

// Which warp goes through the items.
__device__ inline bool walks_items() { return fresh_warp() == kConsumerWarps; }

// Which of its team this block is; worked out where it is used, not kept.
__device__ inline int own_member(const Params& params) {
  u32 index = blockIdx.x;
  mov_b32(index);
  const int block = static_cast<int>(index);
  return block - in_teams(params, block) * params.cta_group_size;
}

// Hands on the item that `count` have preceded.
__device__ inline void hand_on(const Params& params, int member, u32 count, SharedMemory& shared) {
  wait_for(shared.item_empty[item_slot(count)], item_parity(count) ^ 1);
  make_item(params, member, count, shared);
  if (fresh_lane() == 0) arrive_at(shared.item_full[item_slot(count)]);
}

// Brings the query of an item; consumers have brought the first.
__device__ inline void load_query(const Params& params, const Item& item, SharedMemory& shared) {
  if (item.count == 0) return;
  wait_for(shared.query_empty, query_parity(item.count) ^ 1);
  const int thread = fresh_thread() % kProducerThreads;
  begin_query(params, item, shared, thread, kProducerThreads);
  finish_query<2>(shared, shared.query_full, thread, kProducerThreads);
}

// While a query is still in use, so many blocks of the next item are on their way already.
constexpr int kBlocksBeforeQuery = kStages - 1;

// `given` items have been handed on by the warp that does so.
__device__ inline void load_blocks(const Params& params, const Item& item, SharedMemory& shared,
                                   RingPosition<kStages>& position, u32& given) {
  BlockStream stream(params, item);
  const int before = min(item.blocks, kBlocksBeforeQuery);
#pragma unroll 1
  for (int done = 0;; ++done) {
    if (done == before) load_query(params, item, shared);
    // The first item is handed on when its first tokens are on their way, the next when all are.
    const u32 due = item.count + (done == item.blocks ? 2 : min(done, 1));
#pragma unroll 1
    while (walks_items() && given < due) hand_on(params, own_member(params), given++, shared);
    if (done == item.blocks) return;
    // The block's first tokens are there before it asks for more: else the last block's wait for
    // all that others have asked for.
    if (item.count == 0 && done == 1) wait_for(shared.tokens_full[0], 0);
    stream.take_block(shared, position, item.first_block + done);
  }
}

// `walk` is at the first item.
__device__ inline void load_items(const Params& params, const ItemWalk& walk, const Part& first,
                                  SharedMemory& shared) {
  // What an item is about, and its count, is read from there, not kept; all write the same.
  if (fresh_lane() == 0) {
    static_cast<Part&>(shared.items[0]) = first;
    shared.items[0].count = 0;
  }
  __syncwarp();
  if (walks_items()) leave_item(walk, shared);
  RingPosition<kStages> position;
  u32 count = 0;
  u32 given = 0;
#pragma unroll 1
  while (true) {
    load_blocks(params, shared.items[item_slot(count)], shared, position, given);
    count = shared.items[item_slot(count)].count;
    if (next_part(shared, count).request < 0) return;
  }
}
