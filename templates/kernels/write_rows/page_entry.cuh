// The entries that tokens are written to, as requests and positions: those of a block table.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"

__device__ inline bool is_in_order(const Params&) { return false; }

// Where a token is written; -1 if its request or its page does not exist.
__device__ inline i64 entry_of(const Params& params, int token) {
  const int request = params.batch_indices[token];
  const int position = reinterpret_cast<const int*>(params.positions)[token];
  if (request < 0 || request >= params.num_seqs || position < 0) return -1;
  const i64 column = static_cast<i64>(params.kv_indptr[request]) + position / params.page_size;
  if (column < 0 || column >= params.kv_indptr[request + 1] || column >= params.num_indices) {
    return -1;
  }
  // A page that the cache does not have has none of its entries.
  return static_cast<i64>(params.kv_indices[column]) * params.page_size +
         position % params.page_size;
}
