// Where the rows of a query lie in the caller's tensors.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"

// Of row `row` of the tile, or where it is padding of some row: index of the query token among all,
// and its head.
struct QueryRow {
  i64 query;
  int head;
};

__device__ inline QueryRow query_row(const Params& params, const WorkCoord& coord, int row,
                                     bool is_row) {
  const u32 packed_row = is_row ? coord.first_row + row : 0;
  const u32 heads = params.heads;
  // Mostly there is one token, and division takes long.
  const u32 token = kIsSparse || packed_row < heads ? 0 : packed_row / heads;
  return {is_row ? coord.first_query + token : 0, static_cast<int>(packed_row - token * heads)};
}
