// Where the page ids of a request begin in the tables.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"

// Where they begin, and how many there are.
struct TableRow {
  i64 start;
  int pages;
};

// Starts that lie outside the tables are read as the nearest inside.
__device__ inline TableRow table_row(const Params& params, int request) {
  if (kIsSparse || params.kv_indptr == nullptr) {
    return {request * static_cast<i64>(params.block_tables_stride), params.max_pages};
  }
  const int start = max(0, min(params.kv_indptr[request], params.max_pages));
  const int end = max(start, min(params.kv_indptr[request + 1], params.max_pages));
  return {start, end - start};
}
