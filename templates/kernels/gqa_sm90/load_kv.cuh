// The loader, one warp: streams the tiles of keys and values of every item through the ring.

#pragma once

#include "common/barriers.cuh"
#include "common/kv_cache_hint.cuh"
#include "common/params.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/prefetch.cuh"
#include "shared_memory.cuh"
#include "tile_scheduler.cuh"
#include "work_pipeline.cuh"

// A lane copies one box of every kWindowTiles-th tile, of which it reads the page ids ahead.
constexpr int kWindowTiles = kWarpLanes / kTileBoxes;

struct Boxes {
  const int* ids;  // of the request's pages
  int begin;  // boxes that hold a token that some row sees
  int end;
  int box;  // this lane's, counted from the request's first token
  int page;  // its page id
  int next_page;  // that of its next box

  __device__ Boxes() = default;
  __device__ Boxes(const Params& params, const Item& item)
      : ids(params.block_tables + item.request * static_cast<i64>(params.block_tables_stride)),
        begin(item.any_begin / kBoxTokens),
        end(ceil_div(item.any_end, kBoxTokens)),
        box(item.first_tile * kTileBoxes + lane_index()) {
    page = read(box);
    next_page = read(box + kWarpLanes);
  }

  __device__ bool is_inside(int index) const { return index >= begin && index < end; }

  __device__ int read(int index) const {
    return is_inside(index) ? ids[index * kBoxTokens / kPageSize] : 0;
  }

  __device__ void advance() {
    box += kWarpLanes;
    page = next_page;
    next_page = read(box + kWarpLanes);
  }

  // Bytes that come of a tile: boxes that nobody sees are not copied.
  __device__ u32 bytes_of(int tile) const {
    const int first = max(tile * kTileBoxes, begin);
    return static_cast<u32>(min((tile + 1) * kTileBoxes, end) - first) * kBoxBytes;
  }
};

__device__ inline void load_item(const Params& params, const Item& item, Boxes& boxes,
                                 SharedMemory& shared, RingPosition<kStages>& position) {
  const int end = item.first_tile + item.tiles;
  const int own_tile = lane_index() / kTileBoxes;
  const u32 target = lane_index() % kTileBoxes * kBoxBytes;
  const u64 policy = policy_of_lines(params.row_tiles != 1);
#pragma unroll 1
  for (int tile = item.first_tile, in_window = 0; tile < end; ++tile) {
    const bool copies = own_tile == in_window && boxes.is_inside(boxes.box);
    const int slot = boxes.box * kBoxTokens % kPageSize;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const u32 full = shared_address(&shared.stage_full[position.stage]);
      wait_for(shared.stage_empty[position.stage], position.parity ^ 1);
      if (lane_index() == 0) mbarrier_arrive_expect_tx(full, boxes.bytes_of(tile));
      __syncwarp();
      if (copies) {
        cp_async_bulk_tensor(shared_address(shared.tokens[position.stage]) + target,
                             part == 0 ? &params.key_map : &params.value_map, full, policy, 0, slot,
                             0, item.kv_head, boxes.page);
      }
      __syncwarp();
      position.advance();
    }
    if (++in_window == kWindowTiles) {
      in_window = 0;
      boxes.advance();
    }
  }
}

// The loader: copies the tokens of all items.
__device__ inline void load_tokens(const Params& params, SharedMemory& shared) {
  const ItemRing& items = shared.items;
  Item item;
  Boxes boxes;
  do {
    __syncwarp();
    barrier_sync(kStartBarrier, kThreads);
    item = items.at(0, 0);
    wait_for_previous_kernel();
    boxes = Boxes(params, item);
    __syncwarp();
    barrier_sync(kCheckedBarrier, kThreads);
  } while (!shared.is_start_right);
  let_next_kernel_start();
  RingPosition<kStages> position;
#pragma unroll 1
  for (u32 count = 0; !item.is_none();) {
    load_item(params, item, boxes, shared, position);
    items.release(count);
    items.await(++count);
    item = items.at(count, 0);
    boxes = Boxes(params, item);
  }
}

// Brings the page ids of all requests into L2, by the consumers: a line for each thread, and for no
// more tables than that are lines.
__device__ inline void prefetch_ids(const Params& params, int thread) {
  constexpr int kLineIds = 32;
  const u32 row_lines = static_cast<u32>(ceil_div(params.max_pages, kLineIds));
  const u32 line = blockIdx.x * kConsumerThreads + thread;
  if (row_lines == 0) return;
  const u32 request = line / row_lines;
  if (request >= params.num_seqs) return;
  prefetch_l2(params.block_tables + request * static_cast<i64>(params.block_tables_stride) +
              (line - request * row_lines) * kLineIds);
}
