// The page ids of an item's tokens, read ahead by one warp.

#pragma once

#include "common/block_table.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"

struct BlockTableReader {
  const int* page_ids;
  int end;  // pages from here on are not read
  int base;
  int current;  // of page base + lane
  int next;  // of the page 32 after

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

  // The id of the page that it has advanced to: nobody waits for later ones.
  __device__ int id_of_current(int page) const { return __shfl_sync(~0u, current, page - base); }

  // The id of a page, of those from `base` on.
  __device__ int id_of(int page) const {
    const int distance = page - base;
    return __shfl_sync(~0u, distance < kWarpLanes ? current : next, distance % kWarpLanes);
  }

  // No page before this one will be asked for.
  __device__ void advance(int page) {
    if (page - base < kWarpLanes) return;
    base += kWarpLanes;
    current = next;
    next = read(base + kWarpLanes);
  }
};
