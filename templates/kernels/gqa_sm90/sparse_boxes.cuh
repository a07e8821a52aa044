// TMA boxes of a sparse call: the blocks that the indices of a query token and KV head name.

#pragma once

#include "common/paged_kv.cuh"
#include "common/sparse_blocks.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "work_item.cuh"

struct SparseBox {
  int page;
  int tokens;  // the first ones, which the query token attends to; 0: the box is not loaded
};

// Box `box` of a work item. A template: Params of a dense kernel lacks the indices.
template <typename SparseParams>
__device__ inline SparseBox sparse_box(const SparseParams& params, const WorkItem& work, int box) {
  if (work.is_none() || box >= num_indices_of(params, work.first_query)) return {0, 0};
  const int index = block_indices_of(params, work.first_query, work.kv_head)[box];
  const SparseSeq seq = sparse_seq_of(params, work.first_query);
  const i64 tokens = seq.kv_end - static_cast<i64>(index) * kSparseBlock;
  if (index < 0 || tokens <= 0) return {0, 0};
  const i64 row = seq.seq_idx * static_cast<i64>(params.block_tables_stride);
  const int page = params.block_tables[row + index];
  if (!is_valid_page(page, params.num_pages)) return {0, 0};
  return {page, static_cast<int>(min(tokens, static_cast<i64>(kSparseBlock)))};
}
