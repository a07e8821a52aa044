// The consumers: all items of the block, one after the other. Needs hand_over.cuh; of the
// consumers' roles ConsumerState and consume_item.

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
