// Query rows: query token and head of each row of a tile, in the caller's tensors.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"

struct QueryRow {
  i64 query;  // index of the query token in the query tensor
  int head;
};

// Padding, where `is_row` is false, maps to a row that exists, so that its address is valid.
__device__ inline QueryRow query_row(const Params& params, const WorkCoord& coord, int row,
                                     bool is_row) {
  const u32 packed_row = is_row ? coord.first_row + row : 0;
  const u32 heads = params.heads;
  // Most tiles have one query token; the branch avoids an integer division.
  const u32 token = kIsSparse || packed_row < heads ? 0 : packed_row / heads;
  return {is_row ? coord.first_query + token : 0, static_cast<int>(packed_row - token * heads)};
}
