// The page ids of an item's tokens, read ahead by one warp.

#pragma once

#include "common/block_table.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"

struct PageIds {
  const int* ids;
  int end;  // pages from here on are not read
  int base;
  int now;  // of page base + lane
  int later;  // of the page 32 after

  __device__ PageIds(const Params& params, const Part& part)
      : ids(params.block_tables + table_row(params, part.request).start),
        end(ceil_div(min((part.first_block + part.blocks) * kBlockTokens, part.visible_to_any),
                     kPageSize)),
        base(part.first_block * kBlockTokens / kPageSize) {
    now = read(base);
    later = read(base + kWarpLanes);
  }

  __device__ int read(int first) const {
    const int page = first + lane_index();
    return page < end ? ids[page] : -1;
  }

  // The id of the page that it has advanced to: nobody waits for later ones.
  __device__ int of_this(int page) const { return __shfl_sync(~0u, now, page - base); }

  // The id of a page, of those from `base` on.
  __device__ int of(int page) const {
    const int distance = page - base;
    return __shfl_sync(~0u, distance < kWarpLanes ? now : later, distance % kWarpLanes);
  }

  // No page before this one will be asked for.
  __device__ void advance(int page) {
    if (page - base < kWarpLanes) return;
    base += kWarpLanes;
    now = later;
    later = read(base + kWarpLanes);
  }
};
