// Block-table reader: one warp loads the page ids of a work item ahead of their use, two per lane.

#pragma once

#include "common/block_table.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"

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
