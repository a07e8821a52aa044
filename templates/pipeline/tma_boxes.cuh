// TMA boxes of a KV block: as many tokens per copy as lie in one page.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/block_table_reader.cuh"
#include "ptx/cp_async_bulk.cuh"

// Coordinates of the TMA boxes of a KV block. Boxes past the last token are not copied.
struct KvTileBoxes {
  int num_boxes;
  int slot[kBoxes];
  int page[kBoxes];

  __device__ KvTileBoxes(BlockTableReader& block_table, int kv_block, int end_token) {
    const int first_token = kv_block * kBlockN;
    num_boxes = min(ceil_div(end_token - first_token, kBoxTokens), kBoxes);
    block_table.advance(first_token / kPageSize);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int token = first_token + box * kBoxTokens;
      slot[box] = token % kPageSize;
      page[box] = box == 0 ? block_table.current_page_id(token / kPageSize)
                           : block_table.page_id(token / kPageSize);
    }
  }

  __device__ u32 tile_bytes() const { return num_boxes * kBoxTokens * kTileRowBytes; }

  // Copies one tile of the KV block; the bytes count at `barrier`. Called by one lane.
  __device__ void copy_tile(const TensorMap* map, int column, u32 target, u32 barrier,
                            u64 cache_hint, int row_bytes = kTileRowBytes) const {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      if (kBoxes > 1 && box >= num_boxes) continue;
      cp_async_bulk_tensor(target + box * kBoxTokens * row_bytes, map, barrier, cache_hint, 0,
                           slot[box], column, page[box]);
    }
  }
};

// CTAs of a group read the same KV at about the same time. One of them prefetches each KV block
// into L2, so many KV blocks ahead.
constexpr int kPrefetchBlocks = 2;

__device__ inline void prefetch_kv_block(const Params& params, const BlockTableReader& block_table,
                                         int kv_block) {
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    const int token = kv_block * kBlockN + box * kBoxTokens;
    const int page = block_table.page_id(token / kPageSize);
    if (lane_index() != 0) continue;
    cp_async_bulk_prefetch_tensor(&params.kv_map, 0, token % kPageSize, 0, page);
    cp_async_bulk_prefetch_tensor(&params.rope_map, 0, token % kPageSize, 0, page);
  }
}
