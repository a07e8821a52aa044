// The schedulers, three warps: hand items to all roles, and bring each item's query into shared
// memory. Needs SharedMemory, items.cuh, blocks/swizzle.cuh, ptx/cp_async.cuh.

constexpr int kSchedulerThreads = 3 * kWarpLanes;

// Begins to copy the rows of a query, by `threads` threads of which this is number `thread`. A
// row's tiles lie kQueryTileBytes apart; eight lanes copy 128 bytes.
__device__ inline void begin_query(const Params& params, const Item& item, SharedMemory& shared,
                                   int thread, int threads) {
  const int lane = thread % 8;
  for (int row = thread / 8; row < kRows; row += threads / 8) {
    const bool is_row = row < item.rows;
    const int packed_row = is_row ? item.first_row + row : 0;
    const int token = packed_row / params.heads;
    const int head = packed_row - token * params.heads;
    const i64 query = is_row ? item.first_query + token : 0;
    const unsigned char* latent = params.query + query * params.query_stride +
                                  head * params.query_head_stride + lane * kChunkBytes;
    const unsigned char* rope = params.query_rope + query * params.query_rope_stride +
                                head * params.query_rope_head_stride + lane * kChunkBytes;
    const u32 target = shared_address(shared.query) + swizzled_offset<kTileRowBytes>(row, lane);
    const u32 bytes = is_row ? kChunkBytes : 0;  // padding is zeros
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      cp_async_cg_16(target + tile * kQueryTileBytes,
                     tile < kLatentTiles ? latent + tile * kTileRowBytes : rope, bytes);
    }
  }
  cp_async_commit_group();
}

__device__ inline void finish_query(const Barrier& full) {
  cp_async_wait_group<0>();
  fence_proxy_async();
  __syncwarp();
  if (lane_index() == 0) arrive_at(full);
}

// All warps but the loader's bring the first query: nothing can begin without it.
constexpr int kFirstQueryWarps = kThreads / kWarpLanes - 1;

__device__ inline void load_first_query(const Params& params, SharedMemory& shared) {
  const Item& item = shared.items[0];
  if (item.request < 0 || warp_index() == kConsumerWarps) return;
  const int warp = warp_index() < kConsumerWarps ? warp_index() : warp_index() - 1;
  begin_query(params, item, shared, warp * kWarpLanes + lane_index(),
              kFirstQueryWarps * kWarpLanes);
  finish_query(shared.first_query_full);
}

__device__ inline void take_item(const Params& params, int member, u32 count,
                                 SharedMemory& shared) {
  if (warp_index() != kConsumerWarps + 1) return;
  Item& item = shared.items[item_slot(count)];
  ItemWalk(params, shared.scratch, member).next(item);
  if (lane_index() == 0) item.count = count;
  __syncwarp();
}

// All items but the first.
__device__ inline void schedule(const Params& params, int member, SharedMemory& shared) {
  if (lane_index() == 0) arrive_at(shared.item_full[0]);
  if (shared.items[0].request < 0) return;
  const int thread = static_cast<int>(threadIdx.x) % 128 - kWarpLanes;
  for (u32 count = 1;; ++count) {
    Item& item = shared.items[item_slot(count)];
    wait_for(shared.item_empty[item_slot(count)], item_parity(count) ^ 1);
    take_item(params, member, count, shared);
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
