// How many tokens a request has, where tables lead to its pages.

#pragma once

#include "common/block_table.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "config.cuh"

__device__ inline int length_of(const Params& params, int request) {
  return params.seq_lens[request];
}

// `length` is what length_of has for it. As tokens_held says, in fewer instructions.
__device__ inline int tokens_of(const Params& params, int request, int length) {
  const int pages = min(table_row(params, request).pages, kMostTokens / kPageSize);
  return max(0, min(length, pages * kPageSize));
}
