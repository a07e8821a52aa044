// KV loads by TMA: page ids of a work item ahead of their use, and the TMA boxes of a KV block.

#pragma once

#include "common/block_table.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/load.cuh"
#include "scheduler/schedule_range.cuh"

// Called by one thread, before the preceding kernel has ended.
__device__ inline void prefetch_kv_maps(const Params& params) {
  prefetch_tensormap(&params.latent_map);
  prefetch_tensormap(&params.rope_map);
  prefetch_tensormap(&params.kv_map);
}

// One warp reads the page ids of a work item, two per lane.
struct BlockTableReader {
  const int* page_ids;
  int end;  // of the pages of the work item
  int base;
  int current;  // id of page base + lane
  int next;  // id of page base + 32 + lane

  __device__ BlockTableReader(const Params& params, const WorkCoord& coord)
      : page_ids(params.block_tables + block_table_row(params, coord.seq_idx).start),
        end(ceil_div(min((coord.first_kv_block + coord.num_kv_blocks) * kBlockN, coord.kv_end),
                     kPageSize)),
        base(coord.first_kv_block * kBlockN / kPageSize) {
    current = read(base);
    next = read(base + kWarpLanes);
  }

  __device__ int read(int first) const {
    const int page = first + lane_index();
    return page < end ? page_ids[page] : -1;
  }

  // The id of the page last passed to advance: does not depend on the load of `next`.
  __device__ int current_page_id(int page) const { return __shfl_sync(~0u, current, page - base); }

  // The id of a page in [base, base + 64).
  __device__ int page_id(int page) const {
    const int distance = page - base;
    return __shfl_sync(~0u, distance < kWarpLanes ? current : next, distance % kWarpLanes);
  }

  // Drops the pages before `page`.
  __device__ void advance(int page) {
    if (page - base < kWarpLanes) return;
    base += kWarpLanes;
    current = next;
    next = read(base + kWarpLanes);
  }
};

static_assert(kBoxes * kBoxTokens == kBlockN, "TMA boxes fill a tile");

// TMA boxes of a KV block: as many tokens per copy as lie in one page. Boxes past the last token
// are not copied.
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
