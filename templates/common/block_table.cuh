// Where the page ids of a request begin in the tables.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"

// Where they begin, and how many there are.
struct BlockTableRow {
  i64 start;
  int num_pages;
};

// Starts that lie outside the tables are read as the nearest inside.
__device__ inline BlockTableRow block_table_row(const Params& params, int seq_idx) {
  if (kIsSparse || params.kv_indptr == nullptr) {
    return {seq_idx * static_cast<i64>(params.block_tables_stride), params.max_pages};
  }
  const int start = max(0, min(params.kv_indptr[seq_idx], params.max_pages));
  const int end = max(start, min(params.kv_indptr[seq_idx + 1], params.max_pages));
  return {start, end - start};
}
