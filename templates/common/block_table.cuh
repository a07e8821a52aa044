// Row of the block table: where the page ids of a sequence start, and how many there are.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"

struct BlockTableRow {
  i64 start;
  int num_pages;
};

// Clamps `kv_indptr` to the table, so that invalid offsets cannot fault.
__device__ inline BlockTableRow block_table_row(const Params& params, int seq_idx) {
  if (kIsSparse || params.kv_indptr == nullptr) {
    return {seq_idx * static_cast<i64>(params.block_tables_stride), params.max_pages};
  }
  const int start = max(0, min(params.kv_indptr[seq_idx], params.max_pages));
  const int end = max(start, min(params.kv_indptr[seq_idx + 1], params.max_pages));
  return {start, end - start};
}
