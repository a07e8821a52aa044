// What the producers do besides: one of them hands items on, all bring each item's query. Needs
// load_tokens.cuh, roles/mla_hopper/hand_over.cuh, blocks/fresh_thread.cuh.

// By one thread.
__device__ inline void make_item_barriers(const SharedMemory& shared) {
  make_item_barriers(shared, 1, kItemReaders, kLoadingWarps);
}

// Which warp goes through the items.
__device__ inline bool walks_items() { return fresh_warp() == kConsumerWarps; }

__device__ inline void hand_on_first(ItemWalk& walk, const Part& first, SharedMemory& shared) {
  walk.fill(shared.items[0], first, 0);
  __syncwarp();
  if (lane_index() == 0) arrive_at(shared.item_full[0]);
  leave_item(walk, shared);
}

// Hands on the item that `count` have preceded.
__device__ inline void hand_on(const Params& params, int member, u32 count, SharedMemory& shared) {
  wait_for(shared.item_empty[item_slot(count)], item_parity(count) ^ 1);
  take_next_item(params, member, count, shared);
  if (lane_index() == 0) arrive_at(shared.item_full[item_slot(count)]);
}

// Brings the query of an item; consumers have brought the first.
__device__ inline void load_query(const Params& params, const Part& part, u32 count,
                                  SharedMemory& shared) {
  if (count == 0) return;
  wait_for(shared.query_empty, query_parity(count) ^ 1);
  begin_query(params, part, shared, fresh_thread() % kProducerThreads, kProducerThreads);
  finish_query(shared.query_full);
}

// `walk` is at the first item.
__device__ inline void load_items(const Params& params, ItemWalk& walk, const Part& first,
                                  SharedMemory& shared) {
  BlockRooms rooms(shared);
  // What an item is about, and its count, is read from there, not kept; all write the same.
  if (lane_index() == 0) {
    static_cast<Part&>(shared.items[0]) = first;
    shared.items[0].count = 0;
  }
  __syncwarp();
  if (walks_items()) hand_on_first(walk, first, shared);
  for (u32 count = 0;;) {
    const Item& item = shared.items[item_slot(count)];
    if (kBlocksBeforeQuery == 0 || item.blocks == 0) load_query(params, item, count, shared);
    BlockStream stream(params, item);
#pragma unroll 1
    for (int done = 0; done < item.blocks; done += 2) {
      stream.take_block<0>(rooms.room<0>(), item.first_block + done);
      rooms.advance<0>();
      if (kBlocksBeforeQuery == 1 && done == 0) load_query(params, item, item.count, shared);
      if (done + 1 < item.blocks) {
        stream.take_block<1>(rooms.room<1>(), item.first_block + done + 1);
        rooms.advance<1>();
      } else {
        rooms.skip<1>();
      }
    }
    count = item.count;
    if (walks_items()) hand_on(params, own_member(params), count + 1, shared);
    if (next_part(shared, count).request < 0) return;
  }
}
